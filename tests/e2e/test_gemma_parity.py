"""Gemma 3 270M on a server: a slice of `python -m tests.e2e.gemma`, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from manyroots.models.packaged import packaged_model_path
from tests.e2e.conftest import HEADERS, SETTINGS, Server, running
from tests.e2e.gemma import BEYOND, NAME, WINDOW, judge, reference
from tests.helpers.patience import PATIENCE_S

pytestmark = pytest.mark.nightly

NUM_NEW_TOKENS = 8
SLICE = [
    "The capital of France is",
    "   \t日本の首都は\n\n",
    BEYOND + "The end of the story is",
]


@pytest.fixture(scope="module")
def gemma() -> Iterator[Server]:
    with running(NAME, *SETTINGS) as server:
        server.wait_until_ready()
        yield server


def post(server: Server, path: str, **body: object) -> httpx.Response:
    return httpx.post(
        server.url + path, json={"model": NAME, **body}, headers=HEADERS, timeout=PATIENCE_S
    )


def answers(server: Server, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Greedy ones, in one batch, and how many of the prompts' tokens were in the cache."""
    found: dict[str, Any] = post(
        server, "/v1/completions", prompt=prompts, max_tokens=NUM_NEW_TOKENS, temperature=0,
        ignore_eos=True, return_token_ids=True,
    ).json()  # fmt: skip
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [choice["token_ids"] for choice in found["choices"]], cached


def test_greedy_tokens_beyond_the_window_are_transformers_cold_and_cached(gemma: Server) -> None:
    """F01: sixteen tokens a page, so that windows begin in the middle of one."""
    prompts = [post(gemma, "/tokenize", prompt=text).json()["tokens"] for text in SLICE]
    cold, _ = answers(gemma, prompts)
    cached, reused = answers(gemma, prompts)
    gemma.wait_until_idle()
    lengths = [len(prompt) for prompt in prompts]
    assert lengths[-1] > WINDOW
    assert cached == cold
    assert reused >= sum((length - 1) // 16 * 16 for length in lengths)
    model = reference(packaged_model_path(NAME))
    for prompt, answer in zip(prompts, cold, strict=True):
        assert len(answer) == NUM_NEW_TOKENS
        assert judge(model, prompt, answer).wanted == answer


TOKENS = {
    "Hello world": [9259, 1902],
    "a  b": [236746, 138, 236763],
    "  two": [138, 13498],
    "\n\n\ttab": [108, 255968, 4823],
    "😀 🤷🏽\u200d♂️": [242398, 236743, 244269, 242713, 121457],
    "12 3.1": [236770, 236778, 236743, 236800, 236761, 236770],
    "\x00\r\n": [238, 251, 107],
    "x" + 40 * " " + "y": [236781, 167, 145, 236762],
    "<table></b>": [168, 209],
    "<0x0A>": [236820, 236771, 236781, 236771, 236776, 236813],
}
"""As the `sentencepiece` package cuts them with Gemma's vocabulary."""


def test_the_server_serves_it_with_its_first_token_once_and_refuses_chats(gemma: Server) -> None:
    """A base model: it completes texts and has no template for chats."""
    texts = []
    for prompt in ("The capital of France is", "<bos>The capital of France is"):
        options = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = post(gemma, "/v1/completions", **options).json()
        assert answer["usage"]["prompt_tokens"] == 6
        texts.append(answer["choices"][0]["text"])
    assert texts == [" the capital of the country of France."] * 2
    for text, tokens in TOKENS.items():
        assert post(gemma, "/tokenize", prompt=text).json()["tokens"] == [2, *tokens], repr(text)
        assert post(gemma, "/detokenize", tokens=tokens).json()["prompt"] == text
    chat = post(gemma, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    assert chat.status_code == 400
    assert "no chat template" in chat.json()["error"]["message"]
