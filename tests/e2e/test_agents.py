"""What agents sent to this server, replayed over HTTP to a real engine (G04, G05).

`tests/clients/captured` has the requests of three turns each, shortened; one turn is forced to
call a tool. Every answer must be a 200, and the forced one a call. `docs/clients.md` says how the
agents themselves were run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import HEADERS, Server
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_server import MODEL, tiny_server

CAPTURED = Path(__file__).parents[1] / "clients" / "captured"
AGENTS = ("aider", "claude_code", "codex", "open_webui", "qwen_code")
LIMITS = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}
"""The field that ends an answer; `max_tokens` on other paths."""


@pytest.fixture(scope="module")
def agent_server() -> Iterator[Server]:
    """A token is a byte here, so that prompts are long. No thoughts before a call: these weights
    would never end them."""
    with tiny_server("--reasoning-parser", "none", context=24_576, num_pages=3072) as server:
        yield server


@pytest.mark.parametrize("agent", AGENTS)
def test_g05_three_turns_of_an_agent_are_answered(agent_server: Server, agent: str) -> None:
    lines = (CAPTURED / f"{agent}.jsonl").read_text().splitlines()
    num_forced = 0
    with httpx.Client(base_url=agent_server.url, headers=HEADERS, timeout=PATIENCE_S) as client:
        for exchange in map(json.loads, lines):
            body, path = exchange["body"], exchange["path"]
            is_forced = isinstance((body or {}).get("tool_choice"), dict)
            if body is not None:
                limit = LIMITS.get(path.partition("?")[0], "max_tokens")
                body |= {"model": MODEL, limit: 400 if is_forced else 8}
            response = client.request(exchange["method"], path, json=body)
            assert response.status_code == 200, f"{path}: {response.text[:300]}"
            if is_forced:
                num_forced += 1
                assert _called(response.text) == _demanded(body), response.text[-500:]
    assert num_forced == (agent != "aider")  # which offers no tools


def _demanded(body: dict[str, Any]) -> str:
    choice = body["tool_choice"]
    return str(choice.get("function", choice)["name"])


def _called(text: str) -> str | None:
    """The name of the tool that an answer calls, in any API's events."""
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        for found in (event.get("content_block"), event.get("item"), *_chat_calls(event)):
            if isinstance(found, dict) and found.get("name"):
                return str(found["name"])
    return None


def _chat_calls(event: dict[str, Any]) -> list[Any]:
    calls = [
        call
        for choice in event.get("choices", ())
        for call in choice["delta"].get("tool_calls") or ()
    ]
    return [call["function"] for call in calls]
