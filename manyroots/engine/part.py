"""One rank's part of a model, loaded; the only part there is without --tensor-parallel-size.

In: settings, the model's files and the rank's place. Out: weights in memory, how many pages fit
beside them, and a runner once it is known how many there will be. What depends on the model or
the machine is worked out here; what depends on all ranks in `build.py`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from manyroots.config import CacheSettings, EngineSettings, ModelSettings
from manyroots.distributed.shard import WHOLE, Shard
from manyroots.engine.adapter_half import (
    AdapterHalf,
    MakeLoader,
    adapter_limits,
    build_adapter_half,
    slot_bytes,
)
from manyroots.engine.alarm import Alarm
from manyroots.errors import ConfigError
from manyroots.models.fused import why_not_fused
from manyroots.models.llama import Llama
from manyroots.models.load import load_model
from manyroots.models.source import ModelSource
from manyroots.models.spec import ModelSpec
from manyroots.runner.cuda.runner import CudaRunner
from manyroots.runner.torch_runner import TorchRunner
from manyroots.step import Runner
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.arena import PageArena, page_bytes

logger = logging.getLogger(__name__)

MAX_CPU_CACHE_BYTES = 4 * 2**30
CPU_CACHE_SHARE = 0.25
"""On a CPU, pages take at most this share of the machine's memory."""
ACTIVATION_RESERVE = 2**30
"""On a GPU, bytes left alone for activations."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all ranks have alike."""

    num_pages: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A rank's weights, and what fits beside them."""

    model: Llama
    dtype: torch.dtype
    device: torch.device
    shard: Shard
    bytes_per_page: int
    num_pages: int
    """As many as fit here; the engine has the smallest number of all ranks."""
    max_model_len: int
    """The model's or the user's; the engine may have to shorten it."""

    def make_adapters(
        self, settings: EngineSettings, make_loader: MakeLoader = AdapterLoader
    ) -> AdapterHalf | None:
        """Slots for adapters and the way to fill them; None without --enable-lora."""
        lora = settings.lora
        if not lora.enable_lora:
            return None
        return build_adapter_half(
            lora, self.model, self.dtype, self.device, make_loader, fused=self.is_fused(settings)
        )

    def is_fused(self, settings: EngineSettings) -> bool:
        """Whether steps run on the fused kernels of CUDA."""
        if self.device.type != "cuda":
            return False
        reason = why_not_fused(self.model.spec)
        if not self.shard.is_whole:
            reason = reason or "--tensor-parallel-size is above 1"
        if settings.lora.enable_lora and adapter_limits(settings.lora).num_slots is None:
            reason = reason or "--max-loras 0 sets no limit to the adapters on the device"
        if reason is not None:
            logger.warning("no fused kernels for this engine, steps will be slow: %s", reason)
        return reason is None

    def make_runner(
        self, settings: EngineSettings, sizes: Sizes, adapters: AdapterHalf | None
    ) -> TorchRunner:
        """Give it pages and rows."""
        spec = self.model.spec
        arena = PageArena(
            num_pages=sizes.num_pages,
            page_size=settings.cache.block_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
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
class ExecuteHalf:
    """What carries out plans, whole: one rank or several."""

    part: LoadedPart
    """The first rank's."""
    sizes: Sizes
    runner: Runner
    adapters: AdapterHalf | None
    """None without --enable-lora."""
    alarm: Alarm | None
    """Rung when the runner can't go on; None if nothing outside of a step can end it."""


def execute_alone(settings: EngineSettings, source: ModelSource) -> ExecuteHalf:
    """All of the model in this process."""
    part = load_part(settings, source, WHOLE)
    sizes = fit_sizes(settings, part, part.num_pages)
    adapters = part.make_adapters(settings)
    runner = part.make_runner(settings, sizes, adapters)
    return ExecuteHalf(part, sizes, runner, adapters, alarm=None)


def load_part(settings: EngineSettings, source: ModelSource, shard: Shard) -> LoadedPart:
    """Load a rank's weights and count what fits beside them."""
    device = pick_device(settings.model, shard)
    dtype = pick_dtype(settings.model, source, device)
    model = load_model(
        source,
        dtype=dtype,
        device=device,
        load_format=settings.model.load_format,
        seed=settings.model.seed,
        shard=shard,
    )
    # On a GPU, what adapters will take must not be given to pages.
    reserve = 0
    if settings.lora.enable_lora and device.type == "cuda":
        num_slots = adapter_limits(settings.lora).num_slots or 0
        reserve = num_slots * slot_bytes(settings.lora, model, dtype)
    bytes_per_page = page_bytes(model.spec, settings.cache.block_size, dtype)
    max_model_len = _model_length(settings.model, model.spec)
    return LoadedPart(
        model,
        dtype,
        device,
        shard,
        bytes_per_page,
        _count_pages(settings, bytes_per_page, max_model_len, device, reserve),
        max_model_len,
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


def _model_length(settings: ModelSettings, spec: ModelSpec) -> int:
    """The context length asked for, or the model's own."""
    longest = min(spec.max_position_embeddings, spec.max_exact_len)
    if settings.max_model_len is None:
        return longest
    if settings.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len is {settings.max_model_len}; {spec.architecture} here is exact up "
            f"to {longest} tokens. Lower it."
        )
    return settings.max_model_len


def _count_pages(
    settings: EngineSettings,
    bytes_per_page: int,
    max_model_len: int,
    device: torch.device,
    adapter_reserve: int,
) -> int:
    cache = settings.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    num_ranks = settings.model.tensor_parallel_size
    free = _free_bytes(cache, device, num_ranks) - adapter_reserve
    budget = cache.kv_cache_memory_bytes or free
    # More pages than every row at its longest could use would never be touched.
    useful = settings.scheduler.max_num_seqs * -(-max_model_len // cache.block_size) * 2
    num_pages = min(budget // bytes_per_page, useful)
    if num_pages < 1:
        raise ConfigError(
            f"{budget} bytes are left for the cache, and one page takes {bytes_per_page}. "
            "Raise --kv-cache-memory-bytes or --gpu-memory-utilization, or lower --block-size, "
            "--max-loras or --max-lora-rank."
        )
    return int(num_pages)


def _free_bytes(cache: CacheSettings, device: torch.device, num_ranks: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - cache.gpu_memory_utilization) * total) - ACTIVATION_RESERVE
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(MAX_CPU_CACHE_BYTES, int(total * CPU_CACHE_SHARE)) // num_ranks


def fit_sizes(settings: EngineSettings, part: LoadedPart, num_pages: int) -> Sizes:
    """One request of the full length must fit, or it could never be finished."""
    page_size, max_model_len = settings.cache.block_size, part.max_model_len
    capacity = num_pages * page_size
    if max_model_len <= capacity:
        return Sizes(num_pages, max_model_len)
    if settings.model.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, and the cache holds {capacity} tokens "
            f"({num_pages} pages of {page_size}). Lower it, or raise --kv-cache-memory-bytes "
            "or --num-gpu-blocks-override."
        )
    logger.warning("context cut from %d to %d tokens: the cache holds no more", max_model_len,
                   capacity)  # fmt: skip
    return Sizes(num_pages, capacity)
