"""Two ranks in two processes give one rank's tokens; a rank's death is everyone's news at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from manyroots.config import EngineSettings, engine_settings
from manyroots.engine.build import build_engine
from manyroots.engine.process_client import ProcessClient
from manyroots.errors import ConfigError, ModelError, UnavailableError
from manyroots.ids import Namespace, RequestId
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams
from tests.unit.models.tiny import save_tiny

BASE = Namespace(adapter=None, salt=None)
NUM_NEW_TOKENS = 16
AT_ONCE_S = 10.0
"""Far below the ranks' own timeout (60 s), far above what a busy machine needs."""
SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS),
    SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, prompt_logprobs=2, logprobs=3),
    SamplingParams(temperature=1.0, max_tokens=NUM_NEW_TOKENS),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=NUM_NEW_TOKENS),
]


def settings(folder: Path, size: int, **changes: Any) -> EngineSettings:
    values = {
        "model": str(folder),
        "device": "cpu",
        "tensor_parallel_size": size,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 8,
        # Less than a prompt, so that prompts are computed in chunks beside decodes.
        "max_num_batched_tokens": 24,
        **changes,
    }
    return engine_settings(values)


def submit(request_id: int, sampling: SamplingParams) -> Submit:
    prompt = [(request_id * 13 + place * 7) % 90 + 3 for place in range(20 + request_id)]
    return Submit(RequestId(request_id), prompt, BASE, sampling, 7 + request_id, ())


def tokens(settings: EngineSettings) -> dict[int, list[int]]:
    """What an engine gives for one request of each sampling, twice, so that prefixes are reused."""
    engine = build_engine(settings)
    found: dict[int, list[int]] = {}
    try:
        for turn in range(2):
            for index, sampling in enumerate(SAMPLINGS, start=1):
                engine.loop.handle(submit(index + turn * len(SAMPLINGS), sampling))
            while engine.loop.has_work:
                for output in engine.loop.step():
                    assert output.error is None
                    found.setdefault(output.request_id, []).extend(output.tokens)
    finally:
        engine.loop.close()
    return found


@pytest.mark.parametrize("kind", ["llama-tied", "llama-biased", "qwen3-moe-mixed"])
def test_w16_two_ranks_give_one_ranks_tokens(kind: str, tmp_path: Path) -> None:
    """W16: the base model through real processes, greedy and sampled, chunked and reused."""
    save_tiny(tmp_path, kind)
    alone = tokens(settings(tmp_path, 1))
    assert {len(found) for found in alone.values()} == {NUM_NEW_TOKENS}
    assert tokens(settings(tmp_path, 2)) == alone


def test_a_size_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 4"):
        build_engine(settings(tmp_path, 4))


def test_weights_that_no_rank_can_load_leave_no_process_behind(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        build_engine(settings(tmp_path, 2))
    assert children(os.getpid()) == []


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_r04_a_dead_rank_fails_its_requests_and_readiness_at_once(
    is_busy: bool, tmp_path: Path
) -> None:
    """R04: with requests under way and without, nobody waits for the ranks' timeout."""
    save_tiny(tmp_path)

    async def body() -> None:
        client = ProcessClient(settings(tmp_path, 2))
        try:
            await client.start()
            assert client.pid is not None
            [rank] = children(client.pid)
            stream = client.generate(submit(1, SamplingParams(max_tokens=200, ignore_eos=True)))
            if is_busy:
                await anext(stream)
            os.kill(rank, signal.SIGKILL)
            killed = time.monotonic()
            if is_busy:
                with pytest.raises(UnavailableError, match=r"rank 1 .* killed by signal 9"):
                    async for _ in stream:
                        pass
            while client.is_alive:
                assert time.monotonic() - killed < AT_ONCE_S
                await asyncio.sleep(0.02)
            with pytest.raises(UnavailableError):
                await anext(client.generate(submit(2, SAMPLINGS[0])))
        finally:
            await client.close()

    run(body)
