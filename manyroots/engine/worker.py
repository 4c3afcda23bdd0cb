"""One rank's loaded part of a model; the whole model without --tensor-parallel-size.

In: settings, the model's files and the rank's index. Out: weights in memory, the number of pages
that fit beside them, and a runner once the final number is known. Facts of the model or the machine
are computed here; facts of all ranks in `build.py`.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from manyroots.cache.planes import Capacity
from manyroots.config import EngineSettings, ModelSettings
from manyroots.distributed.shard import WHOLE, Shard, apart
from manyroots.engine.adapter_runtime import (
    AdapterRuntime,
    MakeLoader,
    block_bytes,
    build_adapter_runtime,
    known_bytes,
    slot_bytes,
)
from manyroots.engine.grammar_compiles import load_vocabulary
from manyroots.engine.memory import (
    FamilyMemory,
    Sizes,
    count_adapter_room,
    count_pages,
    with_one_memory,
)
from manyroots.engine.tiers import make_tiers, with_host
from manyroots.errors import ConfigError
from manyroots.grammar.cache import GrammarCache
from manyroots.models.chip import Chip, this_chip
from manyroots.models.decoder import Decoder
from manyroots.models.families import check_page_size
from manyroots.models.kernel_set import check_step, kernel_set
from manyroots.models.load import describe, load_model
from manyroots.models.quantization import W4A8
from manyroots.models.source import ModelSource
from manyroots.models.spec import ModelSpec
from manyroots.models.weight_bytes import device_bytes
from manyroots.process.progress import stage
from manyroots.runner.runner import ModelRunner
from manyroots.runner.warmup import prepare_warm_up
from manyroots.step import Runner
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.copy_ends import CopyEnds

if TYPE_CHECKING:
    from manyroots.engine.loop import Alarm

logger = logging.getLogger(__name__)

SWITCH_S = 0.0001
"""A thread that launches a kernel releases the interpreter, and another thread may then keep it for
this long. Steps that launch kernels one by one took up to twice as long while adapters were read
(H200, with Python's default of 5 ms). The effect of this number alone was not measured."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A rank's weights, and what fits beside them."""

    model: Decoder
    memory: FamilyMemory
    num_pages: int
    """Pages of all layers that fit here; the engine uses the smallest number of all ranks."""
    adapter_room: int
    """The same for adapters, in slots or blocks; 0 without --enable-lora."""
    max_model_len: int
    """The model's or the user's length; the engine may shorten it."""

    def make_adapters(
        self, settings: EngineSettings, sizes: Sizes, make_loader: MakeLoader = AdapterLoader
    ) -> AdapterRuntime | None:
        """Slots for adapters and the code that fills them; None without --enable-lora."""
        if not settings.lora.enable_lora:
            return None
        return build_adapter_runtime(
            settings.lora,
            self.model,
            self.model.dtype,
            self.model.device,
            make_loader,
            room=sizes.adapter_room,
            max_num_seqs=settings.scheduler.max_num_seqs,
        )

    def capacities(self, settings: EngineSettings, sizes: Sizes) -> tuple[Capacity, ...]:
        """Each family's capacity on each tier, for the cache."""
        memory, longest = self.memory, -(-sizes.max_model_len // settings.cache.block_size)
        return with_host(
            settings.tiers,
            memory.capacities(sizes),
            memory.unit_bytes,
            num_request_pages=longest,
            num_ranks=self.model.shard.size,
        )

    def make_runner(
        self,
        settings: EngineSettings,
        sizes: Sizes,
        adapters: AdapterRuntime | None,
        grammars: GrammarCache | None = None,
        ends: CopyEnds | None = None,
    ) -> ModelRunner:
        """Give it pages and rows. Ranks have connected by now. `grammars`: only for the rank
        that samples. `ends`: where this rank reports the ends of its copies, if there are
        several ranks."""
        loader = None if adapters is None else adapters.loader
        capacities = self.capacities(settings, sizes)
        runner = _runner(settings, self.model, sizes, loader, capacities, grammars, ends)
        runner.warm_up(settings.scheduler.max_num_batched_tokens)
        return runner


@dataclass(frozen=True, slots=True)
class Executor:
    """Executes plans, on one rank or several."""

    worker: Worker
    """The first rank's worker."""
    num_pages: int
    """Pages of all layers that fit on every rank."""
    sizes: Sizes
    runner: Runner
    adapters: AdapterRuntime | None
    """None without --enable-lora."""
    grammars: GrammarCache
    forget: Callable[[Sequence[bytes]], None]
    """Removes pages from storage, by hash; returns at once."""
    alarm: Alarm | None
    """Rung when the runner cannot continue; None if it can fail only in a step."""


def execute_alone(settings: EngineSettings, source: ModelSource) -> Executor:
    """The whole model in this process."""
    with stage("weights and sizes"):
        worker = load_worker(settings, source, WHOLE)
    sizes = worker.memory.fit(worker.num_pages, worker.adapter_room, worker.max_model_len)
    device = worker.model.device
    per_block = block_bytes(settings.lora, device) if settings.lora.enable_lora else None
    sizes = with_one_memory(settings, sizes, worker.memory, per_block, device)
    with stage("adapter slots"):
        adapters = worker.make_adapters(settings, sizes)
    with stage("pages and warm-up"):
        grammars = make_grammars(settings, source, worker)
        runner = worker.make_runner(settings, sizes, adapters, grammars)
    forget = runner.forget_stored
    return Executor(worker, worker.num_pages, sizes, runner, adapters, grammars, forget, alarm=None)


def make_grammars(settings: EngineSettings, source: ModelSource, worker: Worker) -> GrammarCache:
    """Empty; nothing is loaded for it before its first use."""
    spec = worker.model.spec
    return GrammarCache(
        partial(
            load_vocabulary, settings.model, str(source.path), spec.vocab_size, spec.eos_token_ids
        )
    )


def load_worker(settings: EngineSettings, source: ModelSource, shard: Shard) -> Worker:
    """Load a rank's weights and count what fits beside them."""
    device = pick_device(settings.model, shard)
    if device.type == "cuda":
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        prepare_warm_up()
    dtype = pick_dtype(settings.model, source, device)
    scheduler, drafts = settings.scheduler, settings.scheduler.speculation()
    predicts = drafts is not None and drafts.is_predicted
    predicts_by = settings.cache.block_size if predicts else None
    spec = describe(source, predicts_by=predicts_by)
    check_step(
        spec,
        device,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_num_rows=scheduler.max_num_seqs,
    )
    check_page_size(spec.layers, settings.cache.block_size)
    model = load_model(
        source,
        dtype=dtype,
        device=device,
        load_format=settings.model.load_format,
        seed=settings.model.seed,
        shard=shard,
        kernels=kernel_set(spec, device),
        quantization=settings.model.quantization,
        kv_cache_dtype=settings.cache.kv_cache_dtype,
        predicts_by=predicts_by,
    )
    memory = FamilyMemory(settings, model.families, dtype)
    # No context is longer than what all of the device's memory would hold.
    most_tokens = memory.most_tokens(device_bytes(device), model.spec.max_len)
    max_model_len = _model_length(settings.model, model.spec, most_tokens)
    adapter_room = adapters_bytes = reserved_bytes = 0
    if settings.lora.enable_lora:
        per_slot = slot_bytes(settings.lora, model, dtype)
        per_block = block_bytes(settings.lora, device)
        adapter_room = count_adapter_room(
            settings,
            slot_bytes=per_slot,
            block_bytes=per_block,
            known_bytes=known_bytes(settings.lora),
            page_bytes=memory.page_bytes,
            device=device,
        )
        adapters_bytes = adapter_room * (per_block or per_slot)
    if device.type == "cuda" and settings.cache.kv_cache_memory_bytes is None:
        step = _measured_step_bytes(settings, model, max_model_len)
        logger.info("beside weights and pages: %.2f GiB for a step, %.2f GiB for adapters",
                    step / 2**30, adapters_bytes / 2**30)  # fmt: skip
        reserved_bytes = step + adapters_bytes
    num_pages = count_pages(
        settings, memory, device, reserved_bytes=reserved_bytes, max_model_len=max_model_len
    )
    return Worker(model, memory, num_pages, adapter_room, max_model_len)


def _measured_step_bytes(settings: EngineSettings, model: Decoder, max_model_len: int) -> int:
    """Runs the largest possible step on a temporary runner with one page. Includes the state of its
    rows."""
    before = torch.cuda.memory_allocated(model.device)
    with apart():
        sizes = Sizes((1,) * len(model.families), 0, max_model_len)
        runner = _runner(settings, model, sizes, None)
        own = torch.cuda.memory_allocated(model.device) - before
        try:
            return own + runner.measure_step(
                settings.scheduler.max_num_batched_tokens, with_adapters=settings.lora.enable_lora
            )
        finally:
            runner.close()
            del runner
            gc.collect()
            torch.cuda.empty_cache()


def _runner(
    settings: EngineSettings,
    model: Decoder,
    sizes: Sizes,
    loader: AdapterLoader | None,
    capacities: tuple[Capacity, ...] | None = None,
    grammars: GrammarCache | None = None,
    ends: CopyEnds | None = None,
) -> ModelRunner:
    """`capacities`: None for a runner that copies nothing."""
    page_size = settings.cache.block_size
    arenas = [
        family.make_arena(num_units, page_size, model.dtype, model.device)
        for family, num_units in zip(model.families, sizes.num_units, strict=True)
    ]
    return ModelRunner(
        model,
        arenas,
        loader,
        None
        if capacities is None
        else make_tiers(
            settings.tiers,
            arenas,
            capacities,
            [family.layers for family in model.families],
            model.shard,
            ends,
        ),
        page_size=page_size,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_model_len=sizes.max_model_len,
        use_graphs=not settings.model.enforce_eager,
        grammars=grammars,
        drafts=settings.scheduler.speculation() is not None,
        times_steps=sizes.lent_units > 0,
    )


def pick_device(settings: ModelSettings, shard: Shard) -> torch.device:
    """A rank's device: the CPU with its share of the cores, or its own GPU."""
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch sees no GPU here; use --device cpu.")
    if shard.is_whole:
        return torch.device(kind)
    if kind == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            # Threads spin while they wait: more threads than cores would mostly wait.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // shard.size))
        return torch.device(kind)
    if torch.cuda.device_count() < shard.size:
        raise ConfigError(
            f"--tensor-parallel-size is {shard.size}, and torch sees {torch.cuda.device_count()} "
            "GPUs here; lower it, or use --device cpu."
        )
    device = torch.device(kind, shard.rank)
    torch.cuda.set_device(device)
    return device


def pick_dtype(
    settings: ModelSettings, source: ModelSource, device: torch.device, chip: Chip | None = None
) -> torch.dtype:
    """The dtype of the computation. `chip`: the CPU, if it is not this machine's."""
    asked: torch.dtype | None = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    # Some models with vision state it only for their parts.
    said = (source.config, source.config.get_text_config())
    own = next((one.dtype for one in said if getattr(one, "dtype", None) is not None), None)
    if device.type != "cpu":
        return asked or (own if isinstance(own, torch.dtype) else torch.bfloat16)
    chip = chip or this_chip()
    if asked is None:
        picked, reason = _fast_on(chip, own, settings.quantization)
        logger.info("--dtype auto: %s, since %s", _name(picked), reason)
        return picked
    if chip.is_slow_at(asked):
        logger.warning(
            "this CPU (%s) has no instructions that torch uses for products in %s, which will be "
            "many times slower than in float32; leave --dtype out.", chip.name, _name(asked),
        )  # fmt: skip
    return asked


def _fast_on(chip: Chip, own: object, quantization: str) -> tuple[torch.dtype, str]:
    """The fastest dtype for a checkpoint on `chip`, and the reason in words. `own`: the
    checkpoint's dtype. Only bfloat16 checkpoints are computed in bfloat16: others would lose
    digits."""
    if quantization == W4A8:
        return torch.float32, f"--quantization {W4A8} multiplies its blocks with float32"
    if own is not torch.bfloat16:
        said = _name(own) if isinstance(own, torch.dtype) else "nothing of a dtype"
        return torch.float32, f"the checkpoint's config says {said}, not bfloat16"
    if chip.bf16_products is None:
        return torch.float32, f"this CPU ({chip.name}) has no fast matrix products in bfloat16"
    return own, f"this CPU ({chip.name}) has {chip.bf16_products} and the checkpoint is bfloat16"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model_length(settings: ModelSettings, spec: ModelSpec, most_tokens: int) -> int:
    """The requested context length, or the model's own, which some configs leave open."""
    longest = spec.max_len
    if settings.max_model_len is None:
        return max(1, min(longest, most_tokens))
    if settings.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len is {settings.max_model_len}; {spec.architecture} here is made for "
            f"{longest} tokens. Lower it."
        )
    return settings.max_model_len
