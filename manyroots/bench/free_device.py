"""An engine whose device computes nothing and takes no time: what is left is the processor's share.

Takes the sizes of a case; gives the real loop, scheduler, cache and runner, with everything up to
the packet that a graph's inputs are copied from. In place of kernels there is nothing, and every
token is the same one. All runs on one thread, so that its parts can be
told apart: a step is done when it is launched, and a load so many steps after it was asked for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from manyroots.bench.random_adapters import write_adapters
from manyroots.bench.traffic_cases import TrafficCase, adapter_name
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.config import ModelSettings, SchedulerSettings
from manyroots.engine.loop import EngineLoop
from manyroots.ids import AdapterDigest, Tier
from manyroots.kernels.choice import Kernels, reference_kernels
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.sampling.rows import NO_FAULT, Sampled
from manyroots.layers.step import Step
from manyroots.lora.limits import SPARE_SLOTS, AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec
from manyroots.models.decoder import Decoder
from manyroots.models.load import describe
from manyroots.models.source import resolve_source
from manyroots.runner.device_rows import DeviceRows
from manyroots.runner.graphs import Captured, GraphKey, Graphs
from manyroots.runner.packet import PacketLayout
from manyroots.runner.runner import ModelRunner
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import AdapterIntent, AdapterLoaded, LoadAdapter, Plan, StepResult
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_weights import AdapterWeights

VOCAB_SIZE = 32_768
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 36,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
}
"""As deep as Qwen3-8B, so that an adapter has as many parts; as narrow as may be."""
PAGE_SIZE = 16
NUM_PAGES = 42_000
"""What Qwen3-8B leaves room for on a GPU of 140 GB."""
TOKEN = 7
STEPS_TO_LOAD = {Tier.HOST: 1, Tier.STORAGE: 6}
"""What loads took on an H200, in steps of 8 ms."""
CPU = torch.device("cpu")


class FreeEngine:
    """The parts of an engine, to be watched."""

    def __init__(self, case: TrafficCase, home: Path, settings: SchedulerSettings) -> None:
        (home / "config.json").write_text(json.dumps(SHAPE))
        decoder = _FreeDecoder(
            describe(resolve_source(ModelSettings(model=str(home)))),
            dtype=torch.bfloat16,
            device=CPU,
            kernels=_free_kernels(),
        )
        max_model_len = case.max_len + PAGE_SIZE
        limits = AdapterLimits(max_loras=0, max_cpu_loras=0)
        loader = None
        if case.num_adapters:
            count = case.num_adapters
            limits = AdapterLimits(
                max_loras=count, max_cpu_loras=0, num_spare_slots=-(-count // SPARE_SLOTS)
            )
            loader, spec = _make_loader(decoder, case, limits, home)
        self.cache = PrefixCache(
            CacheLayout.of(PAGE_SIZE, (Capacity(FULL_ATTENTION, NUM_PAGES),)), CachePolicies()
        )
        self.adapters = Residency(limits)
        self.scheduler = Scheduler(settings, self.cache, self.adapters, max_model_len=max_model_len)
        for number in range(case.num_adapters):
            own = replace(spec, digest=_digest(number))
            self.scheduler.load_adapter(adapter_name(number), own, path=str(number))
        meta = torch.device("meta")
        self.model_runner = ModelRunner(
            decoder,
            [family.make_arena(2, PAGE_SIZE, decoder.dtype, meta) for family in decoder.families],
            loader,
            page_size=PAGE_SIZE,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=max_model_len,
            fixed_shapes=True,
            make_graphs=FreeGraphs,
            drafts=settings.speculation() is not None,
        )
        self.runner = RunnerAtOnce(self.model_runner)
        self.loop = EngineLoop(self.scheduler, self.runner)


class _FreeDecoder(Decoder):
    """Gives tensors of the right shape."""

    def hidden(self, tokens: Tensor, step: Step) -> Tensor:
        at = tokens if step.logits_indices is None else step.logits_indices.at
        return torch.empty(len(at), 0)

    def logits(self, hidden: Tensor, rows: LoraRows | None) -> Tensor:
        return hidden


def _free_kernels() -> Kernels:
    """The references, without what steps launch around the model."""
    qk_rope_kv_write, sampling, decode_rows = (
        ModuleType(name) for name in ("rope", "sample", "rows")
    )
    qk_rope_kv_write.look_up = lambda table, positions, dtype: None  # type: ignore[attr-defined]
    sampling.sample = lambda logits, rows: _same_token(len(logits))  # type: ignore[attr-defined]
    decode_rows.begin = _begin  # type: ignore[attr-defined]
    decode_rows.end = lambda tokens, rows, newest: None  # type: ignore[attr-defined]
    return replace(
        reference_kernels(),
        qk_rope_kv_write=qk_rope_kv_write,
        sampling=sampling,
        decode_rows=decode_rows,
    )


def _begin(
    known: Tensor, token_rows: Tensor, newest: Tensor, page_tables: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    return known, page_tables


def _same_token(num_rows: int) -> Sampled:
    sampled = Sampled.empty(num_rows, CPU)
    sampled.packed.zero_()
    sampled.tokens.fill_(TOKEN)
    sampled.faults.fill_(NO_FAULT)
    return sampled


class _FreeGraph:
    def replay(self) -> None:
        """Takes no time."""


class FreeGraphs(Graphs):
    """Every step that may be a graph is one."""

    def _graph_of(self, key: GraphKey) -> Captured:
        captured = self._graphs.get(key)
        if captured is None:
            blank = self._blank(key)
            layout = PacketLayout(blank)
            num_rows = key.size if key.mixed is None else key.mixed.num_samples
            inputs = layout.pack(blank, pin=False)
            graphs = (_FreeGraph(),) * (2 if key.in_two else 1)
            captured = Captured(graphs, layout, inputs, _same_token(num_rows), None)
            self._graphs[key] = captured
        return captured


class RunnerAtOnce:
    """Carries out a plan when it is launched, on the thread that does."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.plans: list[Plan] = []
        """Launched since they were last cleared."""
        self.tables = DeviceRows(inner._batch, CPU, shares=False)
        """On a CPU the runner has none of its own; on a GPU it has."""

    def launch(self, plan: Plan) -> Future[StepResult]:
        self.plans.append(plan)
        self.tables.apply(plan)
        future: Future[StepResult] = Future()
        future.set_result(self._inner.execute(plan))
        return future

    def close(self) -> None:
        self._inner.close()


class _LoaderOfOne(AdapterLoader):
    """Loads the same weights for every adapter, on the calling thread, and answers later."""

    def __init__(self, weights: AdapterWeights, pool: AdapterPool) -> None:
        super().__init__(lambda path: replace(weights, digest=_digest(int(path))), pool)
        self._due: deque[tuple[int, AdapterLoaded]] = deque()
        self._num_asked = 0

    def start(self, intents: Iterable[AdapterIntent]) -> None:
        intents = tuple(intents)
        super().start(intents)
        for intent in intents:
            if isinstance(intent, LoadAdapter):
                at = self._num_asked + STEPS_TO_LOAD[intent.source]
                self._due.append((at, AdapterLoaded(intent.load_id, None)))

    def _begin(self, load: LoadAdapter) -> None:
        if load.target is not None:
            self.pool.load(load.target.slot, self._host_copy(load))

    def finished(self) -> tuple[AdapterLoaded, ...]:
        self._num_asked += 1
        ended = tuple(answer for at, answer in self._due if at <= self._num_asked)
        if ended:
            self._due = deque(entry for entry in self._due if entry[0] > self._num_asked)
        return ended

    def wait(self, timeout_s: float) -> None:
        """Nothing is under way but steps."""


def _make_loader(
    decoder: Decoder, case: TrafficCase, limits: AdapterLimits, home: Path
) -> tuple[AdapterLoader, AdapterSpec]:
    rank = max(case.ranks)
    targets = decoder.adapter_targets()
    [folder] = write_adapters(targets, home, 1, rank, projections=case.projections)
    spec, weights = read_adapter(
        folder, targets, max_rank=rank, dtype=decoder.dtype, vocab_size=VOCAB_SIZE
    )
    assert limits.num_slots is not None
    pool = AdapterPool(
        decoder.lora_parts(),
        num_slots=limits.num_slots,
        num_at_once=limits.max_loras,
        max_rank=rank,
        dtype=decoder.dtype,
        device=CPU,
        is_transposed=False,
    )
    return _LoaderOfOne(weights, pool), spec


def _digest(number: int) -> AdapterDigest:
    return AdapterDigest(number.to_bytes(32, "big"))
