"""One rank's part of a model, loaded; the only part there is without --tensor-parallel-size.

In: settings, the model's files and the rank's place. Out: weights in memory, how many pages fit
beside them, and a runner once it is known how many there will be. What depends on the model or
the machine is worked out here; what depends on all ranks in `build.py`.
"""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from manyroots.config import EngineSettings, ModelSettings
from manyroots.distributed.shard import WHOLE, Shard
from manyroots.engine.adapter_runtime import (
    AdapterRuntime,
    MakeLoader,
    build_adapter_runtime,
    slot_bytes,
)
from manyroots.engine.memory import count_pages, count_slots, estimated_step_bytes
from manyroots.errors import ConfigError
from manyroots.models.decoder import Decoder
from manyroots.models.fused import check_fused_step, why_not_fused
from manyroots.models.load import describe, load_model
from manyroots.models.source import ModelSource
from manyroots.models.spec import ModelSpec
from manyroots.models.weight_bytes import device_bytes
from manyroots.progress import stage
from manyroots.runner.cuda_runner import CudaRunner
from manyroots.runner.torch_runner import TorchRunner
from manyroots.step import Runner
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.arena import PageArena, page_bytes

if TYPE_CHECKING:
    from manyroots.engine.loop import Alarm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all ranks have alike."""

    num_pages: int
    num_slots: int
    """For adapters; 0 without --enable-lora."""
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A rank's weights, and what fits beside them."""

    model: Decoder
    dtype: torch.dtype
    device: torch.device
    shard: Shard
    bytes_per_page: int
    num_pages: int
    """As many as fit here; the engine has the smallest number of all ranks."""
    num_slots: int
    """The same for adapters; 0 without --enable-lora."""
    max_model_len: int
    """The model's or the user's; the engine may have to shorten it."""

    def make_adapters(
        self, settings: EngineSettings, sizes: Sizes, make_loader: MakeLoader = AdapterLoader
    ) -> AdapterRuntime | None:
        """Slots for adapters and the way to fill them; None without --enable-lora."""
        lora = settings.lora
        if not lora.enable_lora:
            return None
        return build_adapter_runtime(
            lora,
            self.model,
            self.dtype,
            self.device,
            make_loader,
            num_slots=sizes.num_slots,
            fused=self.is_fused(settings),
        )

    def is_fused(self, settings: EngineSettings) -> bool:
        """Whether steps run on the fused kernels of CUDA."""
        return is_fused(settings, self.model.spec, self.device, self.shard)

    def make_runner(
        self, settings: EngineSettings, sizes: Sizes, adapters: AdapterRuntime | None
    ) -> TorchRunner:
        """Give it pages and rows."""
        arena = _arena(settings, self.model.spec, sizes.num_pages, self.dtype, self.device)
        loader = None if adapters is None else adapters.loader
        max_num_seqs, max_len = settings.scheduler.max_num_seqs, sizes.max_model_len
        if not self.is_fused(settings):
            return TorchRunner(
                self.model,
                arena,
                loader,
                max_num_seqs=max_num_seqs,
                max_model_len=max_len,
                shard=self.shard,
            )
        runner = CudaRunner(
            self.model,
            arena,
            loader,
            max_num_seqs=max_num_seqs,
            max_model_len=max_len,
            use_graphs=not settings.model.enforce_eager,
        )
        runner.warm_up()
        return runner


@dataclass(frozen=True, slots=True)
class Executor:
    """What carries out plans, whole: one rank or several."""

    worker: Worker
    """The first rank's."""
    sizes: Sizes
    runner: Runner
    adapters: AdapterRuntime | None
    """None without --enable-lora."""
    alarm: Alarm | None
    """Rung when the runner can't go on; None if nothing outside of a step can end it."""


def execute_alone(settings: EngineSettings, source: ModelSource) -> Executor:
    """All of the model in this process."""
    with stage("weights and sizes"):
        worker = load_worker(settings, source, WHOLE)
    sizes = fit_sizes(settings, worker, worker.num_pages, worker.num_slots)
    with stage("adapter slots"):
        adapters = worker.make_adapters(settings, sizes)
    with stage("pages and warm-up"):
        runner = worker.make_runner(settings, sizes, adapters)
    return Executor(worker, sizes, runner, adapters, alarm=None)


def load_worker(settings: EngineSettings, source: ModelSource, shard: Shard) -> Worker:
    """Load a rank's weights and count what fits beside them."""
    device = pick_device(settings.model, shard)
    dtype = pick_dtype(settings.model, source, device)
    spec = describe(source)
    fused = is_fused(settings, spec, device, shard)
    if fused:
        scheduler = settings.scheduler
        check_fused_step(
            spec,
            max_num_tokens=scheduler.max_num_batched_tokens,
            max_num_rows=scheduler.max_num_seqs,
        )
    model = load_model(
        source,
        dtype=dtype,
        device=device,
        load_format=settings.model.load_format,
        seed=settings.model.seed,
        shard=shard,
    )
    bytes_per_page = page_bytes(model.spec, settings.cache.block_size, dtype)
    # No context is longer than what all of the device's memory would hold.
    most_tokens = device_bytes(device) // bytes_per_page * settings.cache.block_size
    max_model_len = _model_length(settings.model, model.spec, most_tokens)
    num_slots = slots_bytes = reserved_bytes = 0
    if settings.lora.enable_lora:
        per_slot = slot_bytes(settings.lora, model, dtype)
        num_slots = count_slots(settings, per_slot, bytes_per_page, device)
        slots_bytes = num_slots * per_slot
    if device.type == "cuda" and settings.cache.kv_cache_memory_bytes is None:
        step = _step_bytes(settings, model, dtype, max_model_len, fused=fused)
        logger.info("beside weights and pages: %.2f GiB for a step, %.2f GiB for adapters",
                    step / 2**30, slots_bytes / 2**30)  # fmt: skip
        reserved_bytes = step + slots_bytes
    return Worker(
        model,
        dtype,
        device,
        shard,
        bytes_per_page,
        count_pages(settings, bytes_per_page, device, reserved_bytes),
        num_slots,
        max_model_len,
    )


def is_fused(settings: EngineSettings, spec: ModelSpec, device: torch.device, shard: Shard) -> bool:
    """Whether steps run on the fused kernels of CUDA."""
    if device.type != "cuda":
        return False
    reason = why_not_fused(spec)
    if not shard.is_whole:
        reason = reason or "--tensor-parallel-size is above 1"
    if reason is not None:
        logger.warning("no fused kernels for this engine, steps will be slow: %s", reason)
    return reason is None


def _step_bytes(
    settings: EngineSettings, model: Decoder, dtype: torch.dtype, max_model_len: int, *, fused: bool
) -> int:
    """What a step takes on a GPU, which must not be given to pages."""
    if fused:
        return _measured_step_bytes(settings, model, dtype, max_model_len)
    return estimated_step_bytes(model.spec, settings, dtype)


def _measured_step_bytes(
    settings: EngineSettings, model: Decoder, dtype: torch.dtype, max_model_len: int
) -> int:
    """By the largest step there may be, on a runner with one page, which is thrown away."""
    device = model.embedding.weight.device
    runner = CudaRunner(
        model,
        _arena(settings, model.spec, 1, dtype, device),
        None,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        use_graphs=not settings.model.enforce_eager,
    )
    try:
        return runner.measure_step(
            settings.scheduler.max_num_batched_tokens, with_adapters=settings.lora.enable_lora
        )
    finally:
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()


def _arena(
    settings: EngineSettings,
    spec: ModelSpec,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PageArena:
    return PageArena(
        num_pages=num_pages,
        page_size=settings.cache.block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=device,
    )


def pick_device(settings: ModelSettings, shard: Shard) -> torch.device:
    """Where a rank computes: on the CPU with its share of the cores, or on a GPU of its own."""
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch sees no GPU here; use --device cpu.")
    if shard.is_whole:
        return torch.device(kind)
    if kind == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            # Threads wait by spinning: more of them than cores would mostly wait.
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


def pick_dtype(settings: ModelSettings, source: ModelSource, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    if device.type == "cpu":
        return torch.float32
    own = getattr(source.config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def _model_length(settings: ModelSettings, spec: ModelSpec, most_tokens: int) -> int:
    """The context length asked for, or the model's own, which some configs give without an end."""
    longest = spec.max_exact_len
    if settings.max_model_len is None:
        return max(1, min(longest, most_tokens))
    if settings.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len is {settings.max_model_len}; {spec.architecture} here is exact up "
            f"to {longest} tokens. Lower it."
        )
    return settings.max_model_len


def fit_sizes(settings: EngineSettings, worker: Worker, num_pages: int, num_slots: int) -> Sizes:
    """One request of the full length must fit, or it could never be finished."""
    page_size, max_model_len = settings.cache.block_size, worker.max_model_len
    capacity = num_pages * page_size
    if max_model_len <= capacity:
        return Sizes(num_pages, num_slots, max_model_len)
    if settings.model.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, and the cache holds {capacity} tokens "
            f"({num_pages} pages of {page_size}). Lower it, or raise --kv-cache-memory-bytes "
            "or --num-gpu-blocks-override."
        )
    logger.warning("context cut from %d to %d tokens: the cache holds no more", max_model_len,
                   capacity)  # fmt: skip
    return Sizes(num_pages, num_slots, capacity)
