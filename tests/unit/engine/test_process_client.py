"""The engine in a process of its own: messages cross, aborts free, deaths are told (R04)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from manyroots.config import EngineSettings, engine_settings
from manyroots.engine.process_client import ProcessClient
from manyroots.errors import ModelError, UnavailableError
from manyroots.ids import Namespace
from manyroots.messages import FinishReason, Submit
from manyroots.sampling import SamplingParams
from tests.helpers.patience import PATIENCE_S
from tests.helpers.slow_steps import slow_steps

BASE = Namespace(adapter=None, salt=None)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """A tiny random model: the boundary is under test, not the model."""
    from transformers import LlamaConfig

    folder: Path = tmp_path_factory.mktemp("tiny")
    LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        architectures=["LlamaForCausalLM"], eos_token_id=1,
    ).save_pretrained(folder)  # fmt: skip
    return engine_settings(
        {"model": str(folder), "load_format": "dummy", "max_num_seqs": 4, "device": "cpu",
         "num_gpu_blocks_override": 64}
    )  # fmt: skip


@asynccontextmanager
async def started(settings: EngineSettings) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(settings)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def request(client: ProcessClient, max_tokens: int = 8) -> Submit:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Submit(client.next_request_id(), list(range(2, 40)), None, sampling, 7, (), None)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE_S))


def test_s06_sequences_share_pages_and_leaving_early_frees_them(settings: EngineSettings) -> None:
    """S06: sequences cross the boundary. Closing a stream frees its pages in the engine."""

    async def body() -> None:
        async with started(settings) as client:

            async def tokens() -> list[int]:
                return [t async for out in client.generate(request(client)) for t in out.tokens]

            first = await tokens()
            assert len(first) == 8
            assert await asyncio.gather(*(tokens() for _ in range(6))) == [first] * 6
            assert client.stats is not None
            assert client.stats.total_hit_tokens >= 6 * 32
            assert client.info.vocab_size == 100
            stream = client.generate(request(client, max_tokens=200))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            last = [out async for out in client.generate(request(client, max_tokens=2))][-1]
            assert last.finish_reason is FinishReason.LENGTH
            while client.stats is None or client.stats.num_held_pages > 0:
                await asyncio.sleep(0.05)

    run(body)


def test_r04_a_dead_engine_fails_its_requests_at_once(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R04: a killed engine process fails running requests and is reported not alive."""

    async def body() -> None:
        async with started(settings) as client:
            stream = client.generate(request(client, max_tokens=200))
            await anext(stream)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(UnavailableError):
                async for _ in stream:
                    pass
            assert not client.is_alive
            with pytest.raises(UnavailableError):
                await anext(client.generate(request(client)))

    monkeypatch.setenv("PYTHONPATH", slow_steps(tmp_path)["PYTHONPATH"])
    run(body)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def body() -> None:
        client = ProcessClient(engine_settings({"model": str(tmp_path)}))
        try:
            with pytest.raises(ModelError, match=tmp_path.name):
                await client.start()
        finally:
            await client.close()

    run(body)
