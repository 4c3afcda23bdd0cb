"""Clients of others, untouched, against the real server: a slice of `python -m tests.clients`.

Those that the test extra installs, and of their checks those that cost few tokens.
"""

from __future__ import annotations

import sys

import pytest

from tests.clients.__main__ import run
from tests.e2e.conftest import API_KEY, Server

OPENAI = (
    "chat_stream_helper", "history_as_it_is_dumped", "tools_streamed", "responses_streamed",
    "responses_parsed", "embeddings",
)  # fmt: skip
ANTHROPIC = ("message", "streamed", "tools_streamed", "counted")


@pytest.mark.parametrize(("name", "checks"), [("openai", OPENAI), ("anthropic", ANTHROPIC)])
def test_g05_a_client_is_served_untouched(
    server: Server, name: str, checks: tuple[str, ...]
) -> None:
    done = run(name, sys.executable, server.url, key=API_KEY, only=checks)
    assert [check["check"] for check in done] == list(checks)
    assert [check for check in done if check["error"] is not None] == []
