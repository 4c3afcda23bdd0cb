"""One request does not stop a server, and a server that is stopped goes on (R03, R07)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import HEADERS, Server
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_server import MODEL, tiny_server
from tests.unit.grammar.test_trial import LINKS, references, rules


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with tiny_server() as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 2, **body}
    return httpx.post(server.url + path, json=body, headers=HEADERS, timeout=PATIENCE_S)


def test_r03_a_deep_schema_grammar_or_tool_is_a_400_and_everything_runs_on(tiny: Server) -> None:
    """R03: each ended the API process, without a line in the log."""
    deep = references(LINKS["items"], 1500)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"],
                  "$defs": deep["$defs"]}  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    say = {"messages": [{"role": "user", "content": "hi"}]}
    before = tiny.api_pid, tiny.children()
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "response_format": schema}),
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"grammar": rules(3000)}}),
        ("/v1/completions", {"prompt": "hi", "ebnf": rules(3000, " ::=")}),
        ("/v1/chat/completions", {**say, "tool_choice": "required", "tools": [tool]}),
    ):
        answer = post(tiny, path, body)
        assert answer.status_code == 400, answer.text
        # The tool is part of the prompt, which is too long for this model before that.
        assert any(why in answer.text for why in ("levels deep", "maximum context length"))
    assert (tiny.api_pid, tiny.children()) == before
    shaped = post(tiny, "/v1/completions", {"prompt": "hi", "guided_choice": ["yes"]})
    assert shaped.status_code == 200


def test_r07_an_api_process_that_dies_is_started_again(tiny: Server) -> None:
    """R07: callers can connect all the time, and the log and the metrics say so."""
    before = tiny.api_pid, tiny.children()
    os.kill(tiny.api_pid, signal.SIGSEGV)
    assert tiny.status("/live") == 200
    tiny.wait_until_ready()
    assert not {tiny.api_pid, *tiny.children()} & {before[0], *before[1]}
    assert post(tiny, "/v1/completions", {"prompt": "hi"}).status_code == 200
    assert tiny.metric("manyroots:api_restarts_total") == 1
    assert "the API process was killed by SIGSEGV; starting it again" in tiny.log()
    tiny.signal(signal.SIGTERM)
    assert tiny.process.wait(PATIENCE_S) == 0
