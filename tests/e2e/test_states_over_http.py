"""A model with recurrent layers over HTTP: reuse, and why there is no more of it (S07)."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import API_KEY, HEADERS, Server, running
from tests.helpers.patience import PATIENCE_S
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_server import write_model
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

ARGUMENTS = {
    "type": "object", "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": ARGUMENTS}}
ANSWER_LEN = 9
"""Tokens that a client has seen when it goes away."""


@pytest.mark.slow
def test_s07_responses_and_metrics_say_why_a_prompt_was_not_reused(tmp_path: Path) -> None:
    """S07, H12: LFM2; a shared head is found from the third request on, with the same tokens."""
    save_tiny(tmp_path, "lfm2", vocab_size=300)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    rng = random.Random(1)
    head = [rng.randrange(3, 300) for _ in range(37)]
    prompts = [head + [rng.randrange(3, 300) for _ in range(11)] for _ in range(3)]
    with running(
        str(tmp_path), "--served-model-name", "tiny", "--api-key", API_KEY, "--block-size", "4",
        "--max-num-seqs", "8",
    ) as server:  # fmt: skip
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=HEADERS) as client:
            details = []
            for prompt in [*prompts, prompts[2]]:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                told = answer.json()["usage"]["prompt_tokens_details"]
                details.append((told["cached_tokens"], told["uncached_because"]))
            text = client.get("/metrics").text
    assert details == [(0, "cold"), (0, "checkpoint"), (36, "cold"), (44, "nothing")]
    pattern = r'^manyroots:prefix_cache_misses_total{.*reason="(\w+)"} (\S+)$'
    missed = {reason: float(count) for reason, count in re.findall(pattern, text, re.M)}
    assert missed == {"cold": 44 + 8, "checkpoint": 44}


class Hybrid:
    """A served model with recurrent layers, and what later turns find."""

    def __init__(self, server: Server, client: httpx.Client) -> None:
        self.server, self.client = server, client

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "temperature": 0, "return_token_ids": True} | fields
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    def answer(self, prompt: list[int], salt: str, length: int) -> list[int]:
        """One that ends by length."""
        fields = {"prompt": prompt, "cache_salt": salt, "max_tokens": length, "ignore_eos": True}
        tokens: list[int] = self.post("/v1/completions", **fields)["choices"][0]["token_ids"]
        return tokens

    def left(self, prompt: list[int], salt: str) -> list[int]:
        """What a client has seen when it goes away in the midst of an answer."""
        body = {
            "model": "tiny", "prompt": prompt, "cache_salt": salt, "max_tokens": 400,
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        seen: list[int] = []
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    seen += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                if len(seen) >= ANSWER_LEN:
                    break
        self.server.wait_until_idle()
        return seen

    def found(self, prompt: list[int], salt: str) -> tuple[int, list[int]]:
        """How much of a turn's prompt is reused, and its tokens."""
        fields = {"prompt": prompt, "cache_salt": salt, "max_tokens": 5, "ignore_eos": True}
        said = self.post("/v1/completions", **fields)
        cached: int = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, said["choices"][0]["token_ids"]


@pytest.mark.slow
def test_h05_a_disconnect_and_a_tool_call_leave_the_next_turn_as_much_as_an_end_by_length(
    tmp_path: Path,
) -> None:
    """H05: LFM2 over HTTP. A client goes away in mid-stream, and a forced tool call is complete, so
    that its grammar ends the answer. The next turn's tokens are those of a cold prompt."""
    write_model(tmp_path, kind="lfm2")
    slow = tmp_path / "slow"
    rng = random.Random(2)
    prompt, more = ([rng.randrange(3, 250) for _ in range(count)] for count in (41, 3))
    with running(
        str(tmp_path), "--served-model-name", "tiny", "--api-key", API_KEY, "--block-size", "4",
        "--max-num-seqs", "4", env=slow_steps(tmp_path, while_there=slow),
    ) as server:  # fmt: skip
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=HEADERS) as client:
            hybrid = Hybrid(server, client)
            slow.touch()  # A quick answer would be over before the server sees the client go.
            seen = hybrid.left(prompt, "left")
            slow.unlink()
            assert seen == hybrid.answer(prompt, "length", len(seen))
            turn = [*prompt, *seen, *more]
            after_length = hybrid.found(turn, "length")
            assert after_length[0] == (len(prompt) + len(seen) - 1) // 4 * 4
            assert hybrid.found(turn, "left") == after_length

            called = hybrid.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}],
                tools=[TOOL], tool_choice="required", max_tokens=200, cache_salt="tool",
                chat_template_kwargs={"enable_thinking": False},
            )  # fmt: skip
            [choice] = called["choices"]
            assert choice["finish_reason"] == "tool_calls", choice
            prompt, seen = called["prompt_token_ids"], choice["token_ids"]
            turn = [*prompt, *seen, *more]
            cached, tokens = hybrid.found(turn, "tool")
            assert cached == (len(prompt) + len(seen) - 1) // 4 * 4
            assert tokens == hybrid.found(turn, "cold")[1]
