"""The composition root: the only place that knows every room of the engine.

In: settings. Out: a loop ready to run, and what the door must know of it. Everything that
depends on the model or the machine is worked out here, once.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity, Layout
from manyroots.cache.policies import CachePolicies
from manyroots.config import CacheSettings, EngineSettings, ModelSettings
from manyroots.engine.adapter_desk import AdapterDesk
from manyroots.engine.adapter_folders import check_folders
from manyroots.engine.adapter_half import adapter_limits, build_adapter_half
from manyroots.engine.loop import EngineLoop
from manyroots.errors import ConfigError
from manyroots.lora.residency import Residency
from manyroots.messages import EngineInfo
from manyroots.models.fused import why_not_fused
from manyroots.models.load import load_model
from manyroots.models.source import ModelSource, resolve_source
from manyroots.models.spec import ModelSpec
from manyroots.runner.cuda.runner import CudaRunner
from manyroots.runner.torch_runner import TorchRunner
from manyroots.scheduler.scheduler import Scheduler
from manyroots.store.arena import PageArena, page_bytes

logger = logging.getLogger(__name__)

MAX_CPU_CACHE_BYTES = 4 * 2**30
CPU_CACHE_SHARE = 0.25
"""On a CPU, pages take at most this share of the machine's memory."""
ACTIVATION_RESERVE = 2**30
"""On a GPU, bytes left alone for activations."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loop and what the door must know of it."""

    loop: EngineLoop
    info: EngineInfo


def build_engine(settings: EngineSettings) -> Engine:
    """Load the model, size the cache and wire everything up."""
    _check_step(settings)
    source = resolve_source(settings.model)
    base_names = {source.name, settings.model.served_model_name or source.name}
    check_folders(settings.lora, base_names)
    device = pick_device(settings.model)
    dtype = pick_dtype(settings.model, source, device)
    model = load_model(
        source,
        dtype=dtype,
        device=device,
        load_format=settings.model.load_format,
        seed=settings.model.seed,
    )
    lora = settings.lora
    spec = model.spec
    fused = is_fused(settings, spec, device)
    half = build_adapter_half(lora, model, dtype, device, fused=fused) if lora.enable_lora else None
    page_size = settings.cache.block_size
    bytes_per_page = page_bytes(spec, page_size, dtype)
    max_model_len = _model_length(settings.model, spec)
    # On a GPU, what adapters will take must not be given to pages.
    adapter_reserve = half.max_device_bytes if half and device.type == "cuda" else 0
    num_pages = _count_pages(settings, bytes_per_page, max_model_len, device, adapter_reserve)
    max_model_len = _fit_length(settings.model, max_model_len, num_pages, page_size)

    arena = PageArena(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=device,
    )
    cache = PrefixCache(
        Layout.of(page_size, (Capacity(FULL_ATTENTION, num_pages),)),
        CachePolicies(reuse=settings.cache.enable_prefix_caching),
    )
    max_num_seqs = settings.scheduler.max_num_seqs
    loader = None if half is None else half.loader
    sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    use_graphs = not settings.model.enforce_eager
    runner = (
        CudaRunner(model, arena, loader, **sizes, use_graphs=use_graphs)
        if fused
        else TorchRunner(model, arena, loader, **sizes)
    )
    adapters = Residency(adapter_limits(settings.lora))
    scheduler = Scheduler(settings.scheduler, cache, adapters, max_model_len=max_model_len)
    logger.info(
        "%s: %s on %s, %d pages of %d tokens (%.2f GiB), context %d",
        source.name, dtype, device, num_pages, page_size,
        num_pages * bytes_per_page / 2**30, max_model_len,
    )  # fmt: skip
    info = EngineInfo(
        model_path=str(source.path),
        model_name=source.name,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        eos_token_ids=spec.eos_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )
    desk = AdapterDesk(lora, scheduler, half.files, base_names=base_names) if half else None
    return Engine(EngineLoop(scheduler, runner, desk=desk), info)


def pick_device(settings: ModelSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch sees no GPU here; use --device cpu.")
    return torch.device(settings.device)


def is_fused(settings: EngineSettings, spec: ModelSpec, device: torch.device) -> bool:
    """Whether steps run on the fused kernels of CUDA."""
    if device.type != "cuda":
        return False
    reason = why_not_fused(spec)
    if settings.lora.enable_lora and adapter_limits(settings.lora).num_slots is None:
        reason = reason or "--max-loras 0 sets no limit to the adapters on the device"
    if reason is not None:
        logger.warning("no fused kernels for this engine, steps will be slow: %s", reason)
    return reason is None


def pick_dtype(settings: ModelSettings, source: ModelSource, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    if device.type == "cpu":
        return torch.float32
    own = getattr(source.config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def _check_step(settings: EngineSettings) -> None:
    scheduler = settings.scheduler
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({scheduler.max_num_batched_tokens}) is below "
            f"--max-num-seqs ({scheduler.max_num_seqs}): a step could not give every running "
            "request one token. Raise the first or lower the second."
        )


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
    budget = cache.kv_cache_memory_bytes or _free_bytes(cache, device) - adapter_reserve
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


def _free_bytes(cache: CacheSettings, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - cache.gpu_memory_utilization) * total) - ACTIVATION_RESERVE
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(MAX_CPU_CACHE_BYTES, int(total * CPU_CACHE_SHARE))


def _fit_length(settings: ModelSettings, max_model_len: int, num_pages: int, page_size: int) -> int:
    """One request of the full length must fit, or it could never be finished."""
    capacity = num_pages * page_size
    if max_model_len <= capacity:
        return max_model_len
    if settings.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, and the cache holds {capacity} tokens "
            f"({num_pages} pages of {page_size}). Lower it, or raise --kv-cache-memory-bytes "
            "or --num-gpu-blocks-override."
        )
    logger.warning("context cut from %d to %d tokens: the cache holds no more", max_model_len,
                   capacity)  # fmt: skip
    return capacity
