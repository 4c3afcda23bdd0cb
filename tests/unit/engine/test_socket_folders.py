"""A server that is killed leaves no folder of its sockets.

`test_restarts.py` shows that none is there while both ends are connected.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.patience import PATIENCE_S


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
