"""The server's life: it listens, loads, drains and ends with the right code (S04, S06)."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from manyroots.api.server import _Server, listen
from manyroots.config import EngineSettings
from manyroots.errors import ConfigError, ModelError
from manyroots.server_config import ServerSettings
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.fake_engine import INFO, FakeEngine
from tests.unit.text.test_tokenizer import write_gguf

pytestmark = pytest.mark.anyio


class Life:
    """A server on a real port, around a fake engine, in this process."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None, **settings: Any) -> None:
        write_gguf(folder / "m.gguf")
        info = dataclasses.replace(INFO, model_path=str(folder / "m.gguf"))
        self.engine = engine or FakeEngine(info=info)
        chosen = ServerSettings(port=0, **settings)
        listener = listen(chosen)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = _Server(self.engine, EngineSettings(), chosen, listener)

    async def run(self, script: Callable[[httpx.AsyncClient], Awaitable[None]]) -> int:
        """Let the server live while the script runs; gives its exit code."""
        life = asyncio.create_task(self.server.run())
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as client:
            await script(client)
            return await asyncio.wait_for(life, PATIENCE_S)

    async def ready(self, client: httpx.AsyncClient) -> None:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)

    async def until_running(self, count: int) -> None:
        while len(self.engine.running) < count:
            await asyncio.sleep(0.01)


BODY = {"model": "tiny", "prompt": "ab", "max_tokens": 3}


async def test_it_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    life = Life(tmp_path)

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        signal.raise_signal(signal.SIGTERM)

    assert await life.run(script) == 0
    assert life.engine.is_closed


async def test_clients_close_idle_connections_before_the_server_does(tmp_path: Path) -> None:
    """Else one that it just closes may be sent a request, which fails."""
    life = Life(tmp_path)

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        web: Any = life.server._web
        theirs = (httpx.Limits().keepalive_expiry, 15.0, 60.0)  # aiohttp's, and proxies'
        assert web.config.timeout_keep_alive > max(theirs)
        signal.raise_signal(signal.SIGTERM)

    assert await life.run(script) == 0


async def test_what_runs_may_finish(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.engine.gate.clear()

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await life.until_running(1)
        signal.raise_signal(signal.SIGTERM)
        while (await client.get("/ready")).status_code != 503:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        life.engine.gate.set()
        assert (await answer).json()["choices"][0]["text"] == "aba"

    assert await life.run(script) == 0


@pytest.mark.parametrize(("limit_s", "signals", "code"), [(0.1, 1, 0), (3600.0, 2, 130)])
async def test_time_is_up_or_a_second_signal_comes(
    tmp_path: Path, limit_s: float, signals: int, code: int
) -> None:
    life = Life(tmp_path, drain_timeout_s=limit_s)
    life.engine.gate.clear()

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await life.until_running(1)
        for _ in range(signals):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.05)
        assert (await answer).status_code == 503

    assert await life.run(script) == code


async def test_an_engine_that_cannot_start_ends_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life(tmp_path)
    life.engine.start_error = ModelError("weights.bin is torn; download it again.")

    async def script(client: httpx.AsyncClient) -> None:
        pass

    assert await life.run(script) == 1
    assert "weights.bin is torn" in capsys.readouterr().err
    assert life.engine.is_closed


async def test_an_engine_that_is_over_ends_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R07: with its reason, and not with 0."""
    life = Life(tmp_path)
    life.engine.gate.clear()

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await life.until_running(1)
        life.engine.end("the engine process was killed by SIGKILL")
        assert (await answer).status_code == 503

    assert await life.run(script) == 1
    assert "killed by SIGKILL" in capsys.readouterr().err
    assert life.engine.is_closed


async def test_it_answers_while_loading_and_can_be_stopped_then(tmp_path: Path) -> None:
    class Slow(FakeEngine):
        async def start(self) -> None:
            await asyncio.Event().wait()  # for ever

    life = Life(tmp_path, Slow())

    async def script(client: httpx.AsyncClient) -> None:
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/ready")).json() == {"status": "loading"}
        signal.raise_signal(signal.SIGINT)

    assert await life.run(script) == 0
    assert life.engine.is_closed


async def test_a_taken_port_names_the_flag(tmp_path: Path) -> None:
    with listen(ServerSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}.*--port"):
            listen(ServerSettings(port=port))
