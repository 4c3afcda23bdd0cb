"""An engine process that dies is started again, a few times (R07)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from manyroots.config import EngineSettings, engine_settings
from manyroots.engine.process_client import ProcessClient
from manyroots.errors import NotFoundError, UnavailableError
from manyroots.ids import AdapterName, Namespace, RequestId
from manyroots.messages import LoadLora, LoadTime, Stats, Submit
from manyroots.sampling import SamplingParams
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_adapters import TinyAdapters

LIMIT_S = 300
BASE = Namespace(adapter=None, salt=None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


def settings_of(tiny: TinyAdapters, **more: Any) -> EngineSettings:
    return engine_settings(
        {"model": str(tiny.model), "max_num_seqs": 1, "device": "cpu", "block_size": 4,
         "num_gpu_blocks_override": 256, "enable_lora": True, "dtype": "float32",
         "lora_modules": [f"gone={tiny.path('other')}", f"few={tiny.path('few')}"],
         "lora_dirs": [str(tiny.dirs)], **more}
    )  # fmt: skip


@asynccontextmanager
async def started(settings: EngineSettings, max_restarts: int) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(settings, max_restarts=max_restarts, first_pause_s=0.05)
    try:
        async with asyncio.timeout(LIMIT_S):
            await client.start()
            yield client
    finally:
        await client.close()


def request(client: ProcessClient, max_tokens: int, adapter: str | None = None) -> Submit:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    name = None if adapter is None else AdapterName(adapter)
    prompt = list(range(2, 20))
    return Submit(client.next_request_id(), prompt, None, sampling, 7, (), adapter=name)


async def tokens(client: ProcessClient, adapter: str | None) -> list[int]:
    return [t async for out in client.generate(request(client, 6, adapter)) for t in out.tokens]


def kill(client: ProcessClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_r07_a_dead_engine_is_started_again_and_serves_those_who_waited(
    tiny: TinyAdapters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """R07: what had begun fails with the reason; what is queued is served; adapters that were
    loaded are known, those that were unloaded are not; the counts are true at every moment. The
    folder of a socket is gone once both ends have it, so that none can be left."""
    sockets = tmp_path / "t"
    sockets.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))

    async def body() -> None:
        async with started(settings_of(tiny), max_restarts=1) as client:
            assert list(sockets.iterdir()) == []
            await client.load_adapter(LoadLora(0, AdapterName("late"), tiny.path("all")))
            await client.unload_adapter(AdapterName("gone"))
            running = client.generate(request(client, 150))
            await anext(running)
            # One row only: these wait for it.
            waiting = [asyncio.create_task(tokens(client, name)) for name in ("late", "few", None)]
            await until(lambda: client.stats is not None and client.stats.num_waiting == 3)
            assert client.stats is not None
            assert client.stats.num_held_pages > 0
            killed = time.monotonic()
            kill(client)
            with pytest.raises(UnavailableError, match="killed by SIGKILL"):
                async for _ in running:
                    pass
            await until(lambda: not client.is_alive)
            assert client.progress is not None, "from the first moment on"
            stats = client.stats
            assert (stats.num_running, stats.num_waiting, stats.num_held_pages) == (0, 3, 0)
            assert stats.num_pages == 0
            with pytest.raises(UnavailableError, match="started again"):
                await anext(client.generate(request(client, 1)))
            wanted = [tiny.greedy(range(2, 20), name, 6) for name in ("all", "few", None)]
            assert await asyncio.gather(*waiting) == wanted
            assert client.is_alive
            assert client.progress is None
            assert list(sockets.iterdir()) == []
            [told_s] = re.findall(r"the engine is back, ([\d.]+) s after it died", caplog.text)
            assert 0 < float(told_s) <= time.monotonic() - killed + 0.1  # rounded
            assert client.num_restarts == 1
            assert await tokens(client, "late") == wanted[0]
            with pytest.raises(NotFoundError):
                await client.unload_adapter(AdapterName("gone"))
            assert client.info.num_pages == 256
            # The second death in a row is one too many.
            last = client.generate(request(client, 150))
            await anext(last)
            kill(client)
            with pytest.raises(UnavailableError, match="killed by SIGKILL"):
                async for _ in last:
                    pass
            assert "killed by SIGKILL" in await client.wait_until_over()
            assert client.is_over
            with pytest.raises(UnavailableError, match="SIGKILL"):
                await anext(client.generate(request(client, 1)))

    monkeypatch.setenv("PYTHONPATH", slow_steps(tiny.model.parent)["PYTHONPATH"])
    with caplog.at_level(logging.INFO):
        asyncio.run(body())
    assert "killed by SIGKILL" in caplog.text
    assert "the last it wrote" in caplog.text
    assert "starting the engine again in 0.05 s (1 of 1 in a row); 3 requests wait" in caplog.text


def test_r07_a_rank_that_dies_ends_the_engine_which_is_started_again(
    tiny: TinyAdapters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R07: and the cause names the rank."""

    async def body() -> None:
        settings = settings_of(
            tiny, tensor_parallel_size=2, enable_lora=False, lora_modules=[], lora_dirs=[]
        )
        async with started(settings, max_restarts=1) as client:
            wanted = await tokens(client, None)
            running = client.generate(request(client, 150))
            await anext(running)
            os.kill(child_of(client.pid), signal.SIGKILL)
            with pytest.raises(UnavailableError, match="rank 1"):
                async for _ in running:
                    pass
            await until(lambda: client.is_alive)
            assert await tokens(client, None) == wanted

    monkeypatch.setenv("PYTHONPATH", slow_steps(tiny.model.parent)["PYTHONPATH"])
    with caplog.at_level(logging.INFO):
        asyncio.run(body())
    assert "rank 1" in caplog.text


def child_of(pid: int | None) -> int:
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_s06_what_is_cut_short_by_closing_is_told_why(
    tiny: TinyAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S06, S04: the server is shutting down, and nothing has died."""

    async def body() -> None:
        async with started(settings_of(tiny), max_restarts=3) as client:
            running = client.generate(request(client, 150))
            await anext(running)
            await client.close()
            with pytest.raises(UnavailableError, match="shutting down"):
                async for _ in running:
                    pass
            assert client.num_restarts == 0

    monkeypatch.setenv("PYTHONPATH", slow_steps(tiny.model.parent)["PYTHONPATH"])
    asyncio.run(body())


class FaultyWatch:
    """Fails at the first step that it is told of, as a bug in a reader of messages would."""

    def __init__(self) -> None:
        self.num_steps = 0

    def begun(self, request_id: RequestId) -> None:
        pass

    def loaded(self, load: LoadTime) -> None:
        pass

    def stepped(self, stats: Stats) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            raise ValueError("columns of different lengths")


def test_r07_an_engine_whose_messages_cannot_be_taken_is_started_again(
    tiny: TinyAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    """R07: no request waits for ever because the reader has died; callers get the reason, and the
    next engine serves."""

    async def body() -> None:
        async with started(settings_of(tiny), max_restarts=1) as client:
            client.watch(FaultyWatch())
            with pytest.raises(UnavailableError, match="can't be taken: ValueError: columns"):
                await tokens(client, None)
            await until(lambda: client.is_alive)
            assert len(await tokens(client, None)) == 6

    asyncio.run(body())
    assert "a message of the engine can't be taken" in caplog.text


def test_r07_a_fault_of_whoever_watches_the_engine_ends_the_server_and_not_its_answers(
    tiny: TinyAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R07: a task that dies without a word would leave every request waiting."""

    async def body() -> None:
        async with started(settings_of(tiny), max_restarts=1) as client:
            running = client.generate(request(client, 150))
            await anext(running)
            monkeypatch.setattr(client, "_handle_death", None)
            kill(client)
            with pytest.raises(UnavailableError, match="can't be watched any more: TypeError"):
                async for _ in running:
                    pass
            assert "can't be watched" in await client.wait_until_over()

    monkeypatch.setenv("PYTHONPATH", slow_steps(tiny.model.parent)["PYTHONPATH"])
    asyncio.run(body())
