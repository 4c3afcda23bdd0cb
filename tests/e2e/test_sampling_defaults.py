"""What a model's generation_config.json says counts where requests say nothing (S01)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import API_KEY, HEADERS, Server, running
from tests.helpers.patience import PATIENCE_S
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import TEMPLATE, tiny_backend

FLAGS = ("--api-key", API_KEY, "--served-model-name", "tiny", "--max-model-len", "96")
PROMPT = list(range(40, 60))
SAID = {"top_k": 1, "repetition_penalty": 1.7, "max_new_tokens": 5, "do_sample": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "llama", vocab_size=300)
    tiny_backend().save(str(folder / "tokenizer.json"))
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps(SAID))
    return folder


def served(folder: Path, *more: str) -> Iterator[Server]:
    template = ("--chat-template", str(folder / "template.jinja"))
    with running(str(folder), *FLAGS, *template, *more) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def as_told(folder: Path) -> Iterator[Server]:
    yield from served(folder)


@pytest.fixture(scope="module")
def switched_off(folder: Path) -> Iterator[Server]:
    yield from served(folder, "--generation-config", "none")


def tokens(server: Server, **fields: Any) -> list[int]:
    body = {
        "model": "tiny", "prompt": PROMPT, "seed": 3, "ignore_eos": True, "return_token_ids": True,
        "max_tokens": 12,
    }  # fmt: skip
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body | fields, headers=HEADERS, timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def chat_length(server: Server, **fields: Any) -> int:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True,
    }  # fmt: skip
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body | fields, headers=HEADERS, timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def test_a_request_that_says_nothing_gets_what_the_file_says(
    as_told: Server, switched_off: Server
) -> None:
    """S01"""
    asked = tokens(switched_off, top_k=1, repetition_penalty=1.7)
    assert tokens(as_told) == asked
    assert tokens(switched_off) != asked
    assert tokens(switched_off, top_k=1) != asked


def test_what_a_request_says_counts(as_told: Server, switched_off: Server) -> None:
    """S01"""
    plain = tokens(switched_off)
    assert tokens(as_told, top_k=0, repetition_penalty=1.0) == plain
    only_one = tokens(switched_off, top_k=0, repetition_penalty=1.7)
    assert tokens(as_told, top_k=0) == only_one


def test_a_chat_without_a_limit_ends_where_the_file_says(
    as_told: Server, switched_off: Server
) -> None:
    """S01: and one with a limit at its own; where nothing is said, at the context's end."""
    assert chat_length(as_told) == 5
    assert chat_length(as_told, max_completion_tokens=7) == 7
    assert chat_length(switched_off) > 20
