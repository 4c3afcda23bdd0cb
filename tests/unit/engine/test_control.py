"""An engine's process that is paused, put to sleep and woken (G06)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from manyroots.engine.client import PauseMode
from manyroots.errors import RequestError, UnavailableError
from tests.tiny_adapters import TinyAdapters
from tests.unit.engine.test_restarts import request, settings_of, started, tokens, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_g06_pause_sleep_and_wake(tmp_path: Path) -> None:
    """G06: who comes in a pause waits; sleep ends the process, and waking brings it back whole."""
    tiny = TinyAdapters(tmp_path)
    settings = settings_of(tiny, weights_dirs=[str(tmp_path)])
    async with started(settings, max_restarts=0) as client:
        ours = await tokens(client, None)
        await client.pause(PauseMode.KEEP)
        waiting = asyncio.create_task(tokens(client, "few"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        with pytest.raises(RequestError, match="weights-dirs"):
            await client.update_weights("nowhere")
        assert (await client.update_weights("model")).error is None
        await client.resume()
        few = await waiting
        assert await tokens(client, None) == ours

        running = asyncio.create_task(_all(client))
        await until(lambda: client.stats is not None and client.stats.num_running == 1)
        await client.sleep(PauseMode.ABORT)
        assert (await running)[-1] == "abort"
        await until(lambda: client.pid is None or not Path(f"/proc/{client.pid}").exists())
        with pytest.raises(UnavailableError, match="asleep"):
            await tokens(client, None)
        await client.wake()
        assert await tokens(client, None) == ours
        assert await tokens(client, "few") == few
        assert client.num_restarts == 0


async def _all(client: object) -> list[str]:
    outputs = client.generate(request(client, 220))  # type: ignore[attr-defined, arg-type]
    return [o.finish_reason.value async for o in outputs if o.finish_reason is not None]
