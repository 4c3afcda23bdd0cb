"""Two ranks in two processes give one rank's tokens; a rank's death is everyone's news at once."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyroots.config import EngineSettings, engine_settings
from manyroots.engine.build import build_engine
from manyroots.engine.loop import EngineLoop
from manyroots.engine.process_client import ProcessClient
from manyroots.errors import ConfigError, ModelError, UnavailableError
from manyroots.ids import AdapterName, Namespace, RequestId
from manyroots.lora.targets import TargetKind
from manyroots.messages import Output, Submit
from manyroots.sampling import SamplingParams
from manyroots.structured_outputs import StructuredOutputsParams
from tests.e2e.conftest import children_of
from tests.helpers.adapter_folders import ExpertFormat, Recipe, write_adapter
from tests.helpers.patience import PATIENCE_S
from tests.helpers.slow_steps import slow_steps
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

BASE = Namespace(adapter=None, salt=None)
NUM_NEW_TOKENS = 8
AT_ONCE_S = 45.0
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


def submit(request_id: int, sampling: SamplingParams, adapter: str | None = None) -> Submit:
    number = request_id % 10
    prompt = [(number * 13 + place * 7) % 90 + 3 for place in range(20 + number)]
    name = None if adapter is None else AdapterName(adapter)
    return Submit(RequestId(request_id), prompt, None, sampling, number, (), adapter=name)


def tokens(settings: EngineSettings, *names: str | None) -> dict[int, list[int]]:
    """What an engine gives each of `names`."""
    engine = build_engine(settings)
    try:
        return asked(engine.loop, *names)
    finally:
        engine.loop.close()


def asked(loop: EngineLoop, *names: str | None) -> dict[int, list[int]]:
    """The tokens of each of `names` with each sampling, twice: prefixes are reused."""
    found: dict[int, list[int]] = {}
    for turn in range(2):
        for each, name in enumerate(names):
            for index, sampling in enumerate(SAMPLINGS):
                request_id = 1000 * turn + 100 * each + index + 1
                loop.handle(submit(request_id, sampling, name))
        found |= given(loop)
    return found


def given(loop: EngineLoop) -> dict[int, list[int]]:
    """The tokens of all requests until nothing is left to do."""
    found: dict[int, list[int]] = {}
    for output in finish(loop):
        assert output.error is None
        found.setdefault(output.request_id, []).extend(output.tokens)
    return found


def finish(loop: EngineLoop) -> Iterator[Output]:
    """Step until nothing is left to do."""
    while loop.has_work or loop.is_reading:
        if not loop.has_work:
            loop.wait_for_read()
        yield from loop.step()


def test_w16_g01_two_ranks_give_one_ranks_tokens_and_follow_its_grammar(tmp_path: Path) -> None:
    """W16: the base model through real processes, greedy and sampled, chunked and reused. Every
    architecture is in `tests/unit/models/test_sharding.py`. G01: the first rank chooses, and so it
    alone has masks; the others have its tokens."""
    save_tiny(tmp_path, "llama-tied", vocab_size=300, eos_token_id=257)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    wanted = StructuredOutputsParams(regex="[a-f]{3,9}(x|y)")
    shaped = SamplingParams(temperature=1.0, max_tokens=16, structured_outputs=wanted)
    plain, masked = [], []
    for size in (1, 2):
        engine = build_engine(settings(tmp_path, size))
        try:
            plain.append(asked(engine.loop, None))
            for number, sampling in enumerate([shaped, SAMPLINGS[0], shaped]):
                engine.loop.handle(replace(submit(number + 1, sampling), stop_ids=(257,)))
            masked.append(given(engine.loop))
        finally:
            engine.loop.close()
    assert {len(found) for found in plain[0].values()} == {NUM_NEW_TOKENS}
    assert plain[0] == plain[1]
    assert masked[0] == masked[1]
    assert all(re.fullmatch(rb"[a-f]{3,9}[xy]", bytes(masked[0][n][:-1])) for n in (1, 3))


DENSE = {
    "all": Recipe(rank=4, scale=0.1),
    "stabilised": Recipe(rank=16, is_rank_stabilised=True, scale=0.1, seed=1),
    "ranks": Recipe(rank=2, ranks={"model.layers.1.mlp.up_proj": 7}, scale=0.15, seed=2),
    "ends": Recipe(rank=6, modules=("embed_tokens", "lm_head"), scale=0.3, seed=3),
    "activated": Recipe(rank=8, invocation_tokens=(10, 17), scale=0.2, seed=4),
}
EXPERTS = {
    form.value: Recipe(rank=4, experts=form, scale=0.15, seed=seed)
    for seed, form in enumerate(ExpertFormat)
}


@pytest.mark.parametrize(
    ("kind", "recipes"), [("llama", DENSE), ("qwen3-moe", EXPERTS)], ids=["dense", "experts"]
)
def test_w16_two_ranks_give_one_ranks_tokens_with_adapters(
    kind: str, recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    """W16: adapters of every format beside the base, more of them than slots."""
    # Twice an expert's width is not the hidden size: else some formats could be read in two ways.
    save_tiny(tmp_path, kind, **({"moe_intermediate_size": 20} if "moe" in kind else {}))
    targets = load_tiny(tmp_path).adapter_targets()
    has_experts = any(target.kind is TargetKind.EXPERTS for target in targets.values())
    assert has_experts == ("moe" in kind)
    modules = []
    for name, recipe in recipes.items():
        write_adapter(tmp_path / name, targets, recipe)
        modules.append({"name": name, "path": str(tmp_path / name)})
    lora = {"enable_lora": True, "lora_modules": modules, "max_loras": 2, "max_lora_rank": 16}
    alone = tokens(settings(tmp_path, 1, **lora), None, *recipes)
    assert len(alone) == 2 * len(SAMPLINGS) * (1 + len(recipes))
    spoken = {tuple(alone[100 * each + 1]) for each in range(1 + len(recipes))}
    assert len(spoken) == 1 + len(recipes), "every adapter says something else"
    assert tokens(settings(tmp_path, 2, **lora), None, *recipes) == alone


def test_an_adapter_that_changed_on_disk_fails_its_requests_and_no_others(tmp_path: Path) -> None:
    """Its content is read by each rank for itself: the digest is checked by all of them."""
    save_tiny(tmp_path)
    targets = load_tiny(tmp_path).adapter_targets()
    modules = []
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(tmp_path / name, targets, Recipe(seed=seed, scale=0.1))
        modules.append({"name": name, "path": str(tmp_path / name)})
    engine = build_engine(
        settings(tmp_path, 2, enable_lora=True, lora_modules=modules, max_loras=1, max_cpu_loras=1)
    )
    try:

        def ask(request_id: int, name: str) -> str | None:
            engine.loop.handle(submit(request_id, SAMPLINGS[0], name))
            return list(finish(engine.loop))[-1].error

        assert ask(1, "first") is None
        assert ask(2, "second") is None  # and so no rank has the first any more
        write_adapter(tmp_path / "first", targets, Recipe(seed=7, scale=0.1))
        error = ask(3, "first")
        assert error is not None
        assert "changed" in error
        assert ask(4, "third") is None
        write_adapter(tmp_path / "first", targets, Recipe(seed=0, scale=0.1))
        assert ask(5, "first") is None
    finally:
        engine.loop.close()


def test_a_size_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 4"):
        build_engine(settings(tmp_path, 4))


def test_weights_that_no_rank_can_load_leave_no_process_behind(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    before = children_of(os.getpid())  # a server of other tests, perhaps
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        build_engine(settings(tmp_path, 2))
    assert children_of(os.getpid()) == before


def test_r04_an_engine_in_ones_own_process_raises_when_a_rank_has_died(tmp_path: Path) -> None:
    """R04: also without a server: the next step raises, and closing does not hang."""
    save_tiny(tmp_path)
    before = children_of(os.getpid())
    engine = build_engine(settings(tmp_path, 2))
    began = time.monotonic()
    try:
        [rank] = set(children_of(os.getpid())) - set(before)
        engine.loop.handle(submit(1, SAMPLINGS[0]))
        engine.loop.step()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="killed by signal 9"):
            list(finish(engine.loop))
        assert engine.loop.has_work, "the next request is told, too"
        with pytest.raises(UnavailableError):
            engine.loop.step()
    finally:
        engine.loop.close()
    assert time.monotonic() - began < AT_ONCE_S
    assert children_of(os.getpid()) == before


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE_S))


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_r04_a_dead_rank_fails_its_requests_and_readiness_at_once(
    is_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R04: with requests under way and without, no request waits for the ranks' timeout."""
    save_tiny(tmp_path)
    monkeypatch.setenv("PYTHONPATH", slow_steps(tmp_path)["PYTHONPATH"])

    async def body() -> None:
        client = ProcessClient(settings(tmp_path, 2))
        try:
            await client.start()
            assert client.pid is not None
            [rank] = children_of(client.pid)
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
