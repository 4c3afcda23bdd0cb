"""A server that is killed leaves no folder of its sockets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_adapters import TinyAdapters
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


def test_the_folder_goes_with_an_engine_whose_server_was_killed_before_it_connected(
    tmp_path: Path,
) -> None:
    code = """
import asyncio, os
from manyroots.config import engine_settings
from manyroots.engine.child import Child

async def begin():
    child = Child()
    start = asyncio.create_task(child.start(engine_settings({"model": "none"}), print))
    while child.pid is None:
        await asyncio.sleep(0)
    print(child.pid, len(os.listdir(os.environ["TMPDIR"])), flush=True)
    os._exit(0)

asyncio.run(begin())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S,
        cwd=Path(__file__).parents[3], env=environment,
    )  # fmt: skip
    pid, num_folders = map(int, done.stdout.split())
    assert num_folders == 1, "there was one to be left"
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"engine {pid} outlives its server"
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
