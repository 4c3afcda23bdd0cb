"""An engine's process that is paused, put to sleep and woken (G06)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from unittest import mock

import pytest

from manyroots.engine.client import PauseMode
from manyroots.engine.process_client import ProcessClient
from manyroots.errors import RequestError, UnavailableError
from manyroots.ids import AdapterName
from manyroots.messages import LoadLora, LoraReply
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_adapters import TinyAdapters
from tests.unit.engine.test_restarts import request, settings_of, started, tokens, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_g06_pause_sleep_and_wake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G06: requests that arrive in a pause wait; sleep ends the process, and waking brings it back
    whole."""
    tiny = TinyAdapters(tmp_path)
    slow = tiny.slow
    env = slow_steps(tiny.model.parent, while_there=slow)
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
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

        await _waits_behind_a_pause_that_kept_requests(client, slow)
        await _is_resumed_while_a_pause_waits(client, slow)

        running = await _running(client, slow)
        load = await _asleep_with_a_load_under_way(client, tiny.path("all"))
        slow.unlink()
        assert (await running)[-1] == "abort"
        with pytest.raises(UnavailableError, match="put to sleep meanwhile"):
            await load
        await until(lambda: client.pid is None or not Path(f"/proc/{client.pid}").exists())
        with pytest.raises(UnavailableError, match="asleep"):
            await tokens(client, None)
        await client.wake()
        assert await tokens(client, None) == ours
        assert await tokens(client, "few") == few
        assert client.num_restarts == 0


async def _waits_behind_a_pause_that_kept_requests(client: ProcessClient, slow: Path) -> None:
    """The remedy for weights that are refused since requests have begun."""
    running = await _running(client, slow)
    await client.pause(PauseMode.KEEP)
    slow.unlink()
    with pytest.raises(RequestError, match="pause with mode wait"):
        await client.update_weights("model")
    await client.pause(PauseMode.WAIT)
    assert await running == ["length"]
    assert (await client.update_weights("model")).error is None
    await client.resume()


async def _is_resumed_while_a_pause_waits(client: ProcessClient, slow: Path) -> None:
    """The pause is cancelled by a caller that does not know of it."""
    running = await _running(client, slow)
    pausing = asyncio.create_task(client.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    assert client.is_paused
    await client.resume()
    with pytest.raises(UnavailableError, match="resumed in the meantime"):
        await pausing
    slow.unlink()
    assert await running == ["length"]
    assert await _all(client) == ["length"]
    for _ in range(2):
        await asyncio.gather(client.resume(), client.pause(PauseMode.KEEP))
        assert client.is_paused, "the engine is: that was asked last"
        assert (await client.update_weights("model")).error is None
    await client.resume()


async def _asleep_with_a_load_under_way(
    client: ProcessClient, path: str
) -> asyncio.Task[LoraReply]:
    """The last message before the engine is told to end: no process would answer it. The engine
    gets both messages at once, however slow this process is."""
    loads: list[asyncio.Task[LoraReply]] = []
    real, pid = client.pause, client.pid
    assert pid is not None

    async def pause(mode: PauseMode) -> None:
        await real(mode)
        os.kill(pid, signal.SIGSTOP)
        load = client.load_adapter(LoadLora(0, AdapterName("late"), path))
        loads.append(asyncio.create_task(load))
        await asyncio.sleep(0)

    try:
        with mock.patch.object(client, "pause", pause):
            await client.sleep(PauseMode.ABORT)
        await asyncio.sleep(0.5)  # a thread of zmq's sends both
    finally:
        os.kill(pid, signal.SIGCONT)
    return loads[0]


async def _running(client: ProcessClient, slow: Path) -> asyncio.Task[list[str]]:
    """One that is not over before `slow` is gone, which makes each step take its time."""
    slow.touch()
    running = asyncio.create_task(_all(client))
    await until(lambda: client.stats is not None and client.stats.num_running == 1)
    return running


async def _all(client: ProcessClient) -> list[str]:
    outputs = client.generate(request(client, 120))
    return [o.finish_reason.value async for o in outputs if o.finish_reason is not None]
