"""The base model with adapters switched on and off: nothing that is decided differs by a byte."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyroots.adapter_names import LoraModule
from manyroots.cache.policies import CachePolicies
from manyroots.config import engine_settings
from manyroots.distributed.wire import RankMessageKind, encode
from manyroots.engine import build
from manyroots.ids import Namespace, RequestId
from manyroots.messages import Abort, Output, Submit
from manyroots.sampling import SamplingParams
from manyroots.step import Plan, StepResult
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.unit.models.tiny import load_tiny, save_tiny

BASE = Namespace(adapter=None, salt=None)
SALTED = Namespace(adapter=None, salt="tenant")
SHARED = list(range(3, 30))


class _Kept:
    """A runner that keeps the bytes of every plan."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.plans: list[bytes] = []

    def launch(self, plan: Plan) -> Future[StepResult]:
        self.plans.append(encode(RankMessageKind.PLAN, plan)[1])
        future: Future[StepResult] = self._runner.launch(plan)
        return future

    def close(self) -> None:
        self._runner.close()


def requests() -> list[Submit]:
    """More than fit at once: of one tenant and none, beginning alike, drawn and greedy."""
    made = []
    for number in range(12):
        prompt = [*SHARED[: 5 + 2 * number], 40 + number, *range(50, 50 + 3 * (number % 4))]
        params = SamplingParams(
            max_tokens=6 + number, temperature=0.8 * (number % 2), top_k=9 * (number % 3)
        )
        salt = "tenant" if number % 5 == 4 else None
        made.append(Submit(RequestId(number), prompt, salt, params, number, (2,), None))
    return made


def run(
    folder: Path, patch: pytest.MonkeyPatch, **lora: Any
) -> tuple[list[bytes], list[Any], list[Output], int]:
    """Plans as bytes, the cache's events with all hashes, what callers get, and retractions."""
    with patch.context() as patches:
        policies = build._policies

        def recorded(*given: Any) -> CachePolicies:
            return replace(policies(*given), records_events=True, identity=b"model")

        patches.setattr(build, "_policies", recorded)
        loop = build.build_engine(
            engine_settings(
                {
                    "model": str(folder / "model"), "device": "cpu", "block_size": 4,
                    "max_num_seqs": 6, "max_num_batched_tokens": 16, "max_model_len": 64,
                    "num_gpu_blocks_override": 22, **lora,
                }
            )
        ).loop  # fmt: skip
    kept = _Kept(loop._runner)
    loop._runner = kept
    outputs: list[Output] = []
    for round_number, batch in enumerate((requests()[:8], requests())):
        for request in batch:
            loop.handle(request)
        for step in range(10_000):
            if not loop.has_work:
                break
            if (round_number, step) == (1, 7):
                loop.handle(Abort([RequestId(3)]))
            outputs.extend(loop.step())
    retractions = loop.stats().total_retractions
    events = loop._scheduler._cache.take_events()
    loop.close()
    return kept.plans, events, outputs, retractions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tiny(folder / "model", "llama")
    targets = load_tiny(folder / "model").adapter_targets()
    for name in ("one", "two"):
        write_adapter(folder / name, targets, Recipe(modules=("q_proj",)))
    return folder


@pytest.mark.parametrize("names", [(), ("one", "two")])
@pytest.mark.parametrize("max_loras", [1, 8])
def test_n02_with_adapters_on_and_unused_all_is_as_with_them_off_byte_for_byte(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str], max_loras: int
) -> None:
    """N02: plans, page hashes, events and outputs, under pressure and with a tenant's salt."""
    off = run(folder, monkeypatch)
    modules = tuple(LoraModule(name, str(folder / name)) for name in names)
    on = run(folder, monkeypatch, enable_lora=True, lora_modules=modules, max_loras=max_loras)
    plans, events, outputs, retractions = off
    assert on[0] == plans
    assert on[1] == events
    assert on[2] == outputs
    assert on[3] == retractions > 0
    assert len(plans) > 20
    assert {len(event.hashes[0]) for event in events} == {32}
