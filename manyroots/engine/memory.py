"""How many pages fit: memory is counted once, at start, after the weights are loaded.

In: settings, what one page takes, and what else will be wanted on the device. Out: a number of
pages, or a refusal that names the flags. Everything that is free goes to pages: what nobody runs
with now is the prefix cache. Where the number of adapters is left open (--max-loras 0), they have a
share of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from manyroots.config import CacheSettings, EngineSettings
from manyroots.errors import ConfigError

MAX_CPU_CACHE_BYTES = 4 * 2**30
CPU_CACHE_SHARE = 0.25
"""On a CPU, pages take at most this share of the machine's memory, unless it is said how much."""
LEAST_PAGE_BYTES = 8192
"""The cache's own records take some 100 bytes a page. Where nobody has said how much to take, pages
so small that these would count (of toy models) are as many as if they had this size."""
ADAPTER_SHARE = 0.25
"""On a GPU, --max-loras 0 gives adapters at most this share of what weights leave. On a CPU they
may take as much as pages may, and take it only as they come."""
MAX_OPEN_SLOTS = 256
"""As many slots as --max-loras 0 makes at most, unless a step may have more rows."""
LIBRARY_RESERVE_BYTES = 256 * 2**20
"""On a GPU, left alone for what libraries and compiled kernels take as they go."""


def count_pages(
    settings: EngineSettings, page_bytes: Sequence[int], device: torch.device, reserved_bytes: int
) -> tuple[int, ...]:
    """By family, of whose pages one takes so many bytes. `reserved_bytes`: what adapters and steps
    will take on a GPU."""
    cache = settings.cache
    if cache.num_gpu_blocks_override is not None:
        return (cache.num_gpu_blocks_override,) * len(page_bytes)
    all_bytes = sum(page_bytes)
    if cache.kv_cache_memory_bytes is not None:
        budget, size = cache.kv_cache_memory_bytes, all_bytes
    else:
        num_ranks = settings.model.tensor_parallel_size
        budget = _free_bytes(cache, device, num_ranks) - reserved_bytes
        size = max(all_bytes, LEAST_PAGE_BYTES)
    num_pages = budget // size
    if num_pages < 1:
        raise ConfigError(
            f"{budget} bytes are left for the cache, and one page takes {all_bytes}. "
            "Raise --kv-cache-memory-bytes or --gpu-memory-utilization, or lower --block-size, "
            "--max-num-batched-tokens, --max-loras or --max-lora-rank."
        )
    return (int(num_pages),) * len(page_bytes)


def count_slots(
    settings: EngineSettings, bytes_per_slot: int, bytes_per_page: int, device: torch.device
) -> int:
    """Slots for adapters on the device: as many as --max-loras says; for 0, as many as fit."""
    lora, cache = settings.lora, settings.cache
    if lora.max_loras:
        return lora.max_loras
    free = _free_bytes(cache, device, settings.model.tensor_parallel_size)
    if device.type == "cuda":
        pages = (cache.num_gpu_blocks_override or 0) * bytes_per_page
        free = int((free - (cache.kv_cache_memory_bytes or pages)) * ADAPTER_SHARE)
    most = max(MAX_OPEN_SLOTS, settings.scheduler.max_num_seqs)
    fit = max(1, min(most, free // max(bytes_per_slot, 1)))
    return min(fit, lora.max_cpu_loras or fit)


def _free_bytes(cache: CacheSettings, device: torch.device, num_ranks: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - cache.gpu_memory_utilization) * total) - LIBRARY_RESERVE_BYTES
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(MAX_CPU_CACHE_BYTES, int(total * CPU_CACHE_SHARE)) // num_ranks
