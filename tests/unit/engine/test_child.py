"""The engine's process, seen from its parent: how it ends."""

from __future__ import annotations

import asyncio

import pytest

from manyroots.config import EngineSettings
from manyroots.engine import child
from manyroots.engine.child import Child, StartedProcess


class SilentChild(Child):
    """Its process never connects."""

    async def _launch(self) -> StartedProcess:
        self._socket.bind(f"ipc://{self._folder.name}/engine")
        return await asyncio.create_subprocess_exec("sleep", "60")


def test_r04_a_process_that_has_not_connected_yet_can_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R04: as when another replica refuses its settings. The first message still waits for the
    connection, and so does the one that asks the process to end."""
    monkeypatch.setattr(child, "CLOSE_TIMEOUT_S", 0.05)

    async def run() -> int | None:
        silent = SilentChild()
        starting = asyncio.create_task(silent.start(EngineSettings(), lambda _: None))
        while silent.pid is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # the settings are on their way
        starting.cancel()
        await silent.close()
        assert silent._process is not None
        return silent._process.returncode

    assert asyncio.run(run()) == -9
