"""The worst bodies of every field: refused or answered, and `/live` meanwhile (R03)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manyroots.api.json_body import MAX_CONTAINERS, MAX_VALUES, LargeBodies, parse_json
from manyroots.errors import RequestError, TooLargeError
from tests.soaks.worst_cases import Asked, run_seed
from tests.unit.api.harness import Harness

pytestmark = pytest.mark.anyio
PLAIN = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
MANY = PLAIN | {"prompt": ["hi"] * 256}
NUM_TRIES = 4
"""Processor time is no exact measure: on a shared machine cold caches and stolen time count as
work. A body that is slow to read is so at every try."""


def test_r03_worst_bodies_are_answered_and_live_meanwhile() -> None:
    """A slice of `python -m tests.soaks.worst_cases`."""
    for seed in range(200):
        for _ in range(NUM_TRIES):
            why = run_seed(seed)[1]
            if why is None or ": /live is 200 after " not in why:
                break
        assert why is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (MANY | {"allowed_token_ids": [5] * 1_000_000}, 200),
        (MANY | {"allowed_token_ids": [5, 6, 7] * 330_000 + [300]}, 400),
        (MANY | {"bad_words": ["ab " * 85] * 1024}, 200),
        (MANY | {"bad_words": [f"{i} " + "ab " * 80 for i in range(1024)]}, 400),
        (PLAIN | {"prompt": [5] * 1_000_000}, 400),
        (PLAIN | {"allowed_token_ids": [5] * 2_600_000}, 413),
        (PLAIN | {"metadata": [{}] * 1_800_000}, 413),
        (PLAIN | {"user": "a, [b], {c} " * 600_000}, 200),
    ],
    ids=["ids", "unknown id", "one word", "words", "prompt", "values", "objects", "text"],
)
async def test_r03_a_large_body_leaves_live_quick(body: Any, status: int) -> None:
    """R03: these took the event loop seconds to minutes."""
    asked = Asked(Harness().client)
    await asked.ask("/v1/completions", json.dumps(PLAIN | {"user": "x" * 2_000_000}).encode())
    faults = []
    for _ in range(NUM_TRIES):
        answered, why = await asked.ask("/v1/completions", json.dumps(body).encode())
        assert answered == status
        if why is None:
            return
        faults.append(why)
        assert all(fault.startswith("/live is 200 after ") for fault in why.split("; ")), why
    pytest.fail(f"{faults}")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
async def test_r03_a_conversation_of_many_parts_leaves_live_quick(path: str) -> None:
    """R03: turning 60,000 parts into a chat took 0.1 s or more on the event loop."""
    many = [{"type": "text", "text": "a"}] * 60_000
    said = [{"role": "user", "content": many}]
    given: dict[str, Any] = {"messages": said, "max_tokens": 1}
    if path == "/v1/responses":
        parts = [{"type": "input_text", "text": "a"}] * 60_000
        given = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 1}
    asked = Asked(Harness().client)
    await asked.ask("/v1/completions", json.dumps(PLAIN | {"user": "x" * 2_000_000}).encode())
    for _ in range(NUM_TRIES):
        status, why = await asked.ask(path, json.dumps({"model": "tiny"} | given).encode())
        assert status in (200, 400)
        if why is None:
            return
    pytest.fail(why)


def test_r03_a_large_body_is_read_as_a_small_one_is() -> None:
    """The helper process says of a body what this one would."""
    large, padding = LargeBodies(), " " * (1 << 16)
    good = {"a": [1, 2.5, None, True, "\u00e4\U0001f33f"], "b": {"": {}}}
    told = (json.dumps(good) + padding).encode()
    assert large.parse(told) == parse_json(told) == good
    twice, nan, half = '{"a": 1, "a": 2}', '{"a": [NaN]}', '{"a": "\\ud800"}'
    for bad in (twice, nan, half, "{", "[" * 100_000, "1" * 9000):
        bad_body = (padding + bad).encode()
        with pytest.raises(RequestError) as here:
            parse_json(bad_body)
        with pytest.raises(RequestError) as there:
            large.parse(bad_body)
        assert (str(there.value), there.value.field) == (str(here.value), here.value.field)


@pytest.mark.parametrize("item", [b"5,", b"[],", b"{},"])
def test_r03_a_body_of_too_many_values_is_told_so(item: bytes) -> None:
    most = MAX_VALUES if item == b"5," else MAX_CONTAINERS
    with pytest.raises(TooLargeError, match=f"at most {MAX_VALUES} values and {MAX_CONTAINERS}"):
        parse_json(b"[" + item * (most + 1) + b"5]")
    parse_json(b'["' + b"a," * most + b'"]')
