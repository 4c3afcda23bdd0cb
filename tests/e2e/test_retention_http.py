"""Prefixes that requests ask to keep, through a real server of a hybrid model (T13)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.e2e.conftest import API_KEY, HEADERS, Server, running
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_server import write_model

PAGE = 4
HEAD = 36


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for some 250 tokens, and a state at the end of a prompt alone."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_model(folder, 240, kind="lfm2")
    with running(
        str(folder), "--served-model-name", "tiny", "--api-key", API_KEY, "--block-size", str(PAGE),
        "--max-num-seqs", "2", "--num-gpu-blocks-override", "64", "--dtype", "float32",
    ) as server:  # fmt: skip
        server.wait_until_ready()
        yield server


class Asking:
    """A client with prompts of its own."""

    def __init__(self, server: Server, seed: int) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=HEADERS)
        self._rng = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 250) for _ in range(count)]

    def post(self, prompt: list[int], **more: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
        return self._client.post("/v1/completions", json=body | {"return_token_ids": True})

    def ask(self, prompt: list[int], **more: Any) -> tuple[int, list[int]]:
        """How many tokens were cached, and the answer."""
        answer = self.post(prompt, **more)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        cached: int = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, said["choices"][0]["token_ids"]

    def flood(self) -> None:
        for _ in range(12):
            self.ask(self.tokens(40))


def keep(**more: Any) -> dict[str, Any]:
    return {"retention": [{"until_token": HEAD, "for_s": 3600} | more]}


@pytest.mark.slow
def test_t13_a_marked_head_survives_a_flood_and_resumes_with_the_same_tokens(
    server: Server,
) -> None:
    """T13, H12: pages and the state at the mark, which no interval would have saved."""
    asking = Asking(server, 1)
    marked, plain, short = (asking.tokens(HEAD) for _ in range(3))
    asking.ask(marked + asking.tokens(9), **keep())
    asking.ask(plain + asking.tokens(9))
    asking.ask(short + asking.tokens(9), **keep(for_s=0))
    next_turn = marked + asking.tokens(9)
    assert asking.ask(next_turn[: HEAD + 5])[0] == HEAD, "the second request resumes at the mark"
    asking.flood()
    cached, answer = asking.ask(next_turn)
    assert cached == HEAD
    assert asking.ask(plain + asking.tokens(9))[0] == 0
    assert asking.ask(short + asking.tokens(9))[0] == 0, "its time was over"
    cold = asking.ask(next_turn, cache_salt="elsewhere")
    assert cold == (0, answer)


@pytest.mark.slow
def test_t13_anthropics_client_sees_what_was_created_and_read(server: Server) -> None:
    """T13: creation, reading and the rest add up to the prompt, on every turn."""
    client = anthropic.Anthropic(base_url=server.url, api_key=API_KEY, max_retries=0)
    system: Any = [
        {"type": "text", "text": "You answer in few words, and you never guess at all.",
         "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]  # fmt: skip
    total: list[int] = []
    seen: list[tuple[bool, bool]] = []
    for question in ("who?", "when?"):
        usage = client.messages.create(
            model="tiny", max_tokens=4, system=system,
            messages=[{"role": "user", "content": question}],
        ).usage  # fmt: skip
        created, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
        assert usage.cache_creation is not None
        assert usage.cache_creation.ephemeral_1h_input_tokens == created
        counted = client.messages.count_tokens(
            model="tiny", system=system, messages=[{"role": "user", "content": question}]
        )
        total.append(usage.input_tokens + created + read - counted.input_tokens)
        seen.append((created > 0, read > 0))
    assert total == [0, 0]
    assert seen == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        ("completions", {"retention": [{"until_token": 0}]}, "until_token is 0"),
        ("completions", {"retention": [{"until_token": 9, "priority": 101}]}, "priority is 101"),
        ("completions", {"retention": [{"until_token": 9, "for_s": 1e9}]}, "from 0 to 86400"),
        ("completions", {"retention": [{"until_token": 9}] * 9}, "at most 8"),
        ("messages", {"cache_control": {"type": "forever"}}, "'ephemeral'"),
        ("messages", {"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "'5m' or '1h'"),
    ],
)
def test_t13_what_can_not_be_kept_is_refused(
    server: Server, path: str, more: dict[str, Any], says: str
) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4} | more
    prompt: dict[str, Any] = {"prompt": [3, 4, 5]}
    if path == "messages":
        prompt = {"messages": [{"role": "user", "content": "hi"}]}
    url = f"{server.url}/v1/{path}"
    answer = httpx.post(url, json=body | prompt, headers=HEADERS, timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
