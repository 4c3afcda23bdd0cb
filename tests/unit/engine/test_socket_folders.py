"""A server that is killed leaves no folder of its sockets behind."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from tests.tiny_adapters import TinyAdapters
from tests.unit.engine.test_restarts import kill, settings_of, started, tokens, until


def test_the_folder_of_a_socket_is_gone_once_both_ends_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing is there to be left, whenever the server is killed; an engine that is
    started again has a folder of its own, which goes the same way."""
    tiny = TinyAdapters(tmp_path / "tiny")
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def serve() -> None:
        async with started(settings_of(tiny), max_restarts=1) as client:
            assert list(folder.iterdir()) == []
            answer = await tokens(client, None)
            assert len(answer) == 6
            first = client.pid
            kill(client)
            await until(lambda: client.is_alive and client.pid != first)
            assert await tokens(client, None) == answer
            assert list(folder.iterdir()) == []

    asyncio.run(serve())
