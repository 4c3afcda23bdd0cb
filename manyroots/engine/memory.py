"""Counts the pages and states that fit: once, at start, after the weights are loaded.

In: settings, the sizes of pages and states, and other needs of device memory. Out: the number of
pages of all layers that fit beside states, which ranks compare. Then each family's share, or a
refusal that names the flags. All free memory goes to pages and states: what running requests do not
use is the prefix cache. With --max-loras auto, adapters have a share.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from manyroots.cache.families.attention import attention_families
from manyroots.cache.families.family import Family
from manyroots.cache.families.recurrent import recurrent_families
from manyroots.cache.planes import Capacity
from manyroots.cache.split import (
    SHORT,
    Demand,
    FamilyBytes,
    largest_shares,
    longest_that_fits,
    split,
    told,
)
from manyroots.cache.state_share import StateShare
from manyroots.config import CacheSettings, EngineSettings
from manyroots.errors import ConfigError, ModelError
from manyroots.lora.limits import SPARE_SLOTS
from manyroots.models.families import LayerFamily

logger = logging.getLogger(__name__)

MAX_CPU_CACHE_BYTES = 4 * 2**30
CPU_CACHE_SHARE = 0.25
"""Most of a machine's memory that pages take on a CPU, unless a size is set."""
LEAST_PAGE_BYTES = 8192
"""The cache's own records take some 100 bytes a page. Without a set size, the number of smaller
pages (of toy models) is limited as if they had this size."""
LEAST_ADAPTER_SHARE, MOST_ADAPTER_SHARE = 0.125, 0.25
"""On a GPU, --max-loras auto gives adapters at least the first share of the memory that weights
leave. They get up to the second if --lora-modules, or a few adapters of the maximum rank, need it.
On a CPU they may take as much as pages, and only as they are loaded."""
FEW_ADAPTERS = 8
ROOM_FOR_MORE = 1.25
"""Space for other adapters beside those known at start."""
SPARE_SHARE = 0.01
"""Most of the memory that weights leave which spare slots may take."""
LEAST_WORTH = 8
"""A checkpoint is worth its memory if it saves a request at least this part of the tokens whose
keys and values would take as much."""
LIBRARY_RESERVE_BYTES = 256 * 2**20
"""Reserved on a GPU for memory that libraries and compiled kernels allocate later."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that all ranks share."""

    num_units: tuple[int, ...]
    """By family of layers: pages, or states."""
    adapter_room: int
    """Room for adapters, in slots or blocks (see `count_adapter_room`); 0 without --enable-lora."""
    max_model_len: int
    lent_units: int = 0
    """Of the first family's units, those in whose memory adapters have their blocks at start; 0
    where the two share nothing."""
    lent_unit_bytes: int = 0
    """What one of these takes."""


class FamilyMemory:
    """The families of a model's layers, and the bytes of one rank's units."""

    def __init__(
        self, settings: EngineSettings, families: Sequence[LayerFamily], dtype: torch.dtype
    ) -> None:
        scheduler, cache = settings.scheduler, settings.cache
        self._page_size = page_size = cache.block_size
        self._num_step_tokens = scheduler.max_num_batched_tokens
        threshold = scheduler.long_prefill_token_threshold or self._num_step_tokens
        self._num_chunk_tokens = min(self._num_step_tokens, threshold)
        self._is_asked_for = settings.model.max_model_len is not None
        self._families = families
        self._paged = [f for f in families if not f.is_state]
        if not self._paged:
            raise ModelError(
                "no layer of the model attends; this version serves recurrent layers beside "
                "attention. Choose another model."
            )
        self._page_bytes = [f.unit_bytes(page_size, dtype) for f in self._paged]
        self.page_bytes = sum(self._page_bytes)
        """Bytes of a page of all layers with pages."""
        self._state_bytes = [f.unit_bytes(page_size, dtype) for f in families if f.is_state]
        self._interval = 0
        """Interval of checkpoints, in pages."""
        self.states: StateShare | None = None
        """None if no layer has a state."""
        if self._state_bytes:
            self._interval = -(-self._interval_tokens(cache) // page_size)
            self.states = StateShare(
                state_bytes=sum(self._state_bytes),
                token_bytes=Fraction(self.page_bytes, page_size),
                num_working=scheduler.max_num_seqs,
                interval_tokens=self._interval * page_size,
                checkpoint_bytes=cache.checkpoint_memory_bytes,
            )

    def _interval_tokens(self, cache: CacheSettings) -> int:
        """A checkpoint splits a step's prompts and takes memory. The interval is at least the
        tokens of one step, and its tokens take at least as much memory as the checkpoint."""
        if cache.checkpoint_interval_tokens is not None:
            return cache.checkpoint_interval_tokens
        as_many = sum(self._state_bytes) * self._page_size // self.page_bytes
        return max(self._num_chunk_tokens, as_many)

    @property
    def unit_bytes(self) -> list[int]:
        """Bytes of one unit, by family."""
        return self._page_bytes + self._state_bytes

    def request_bytes(self, num_tokens: int) -> int:
        """The device memory that a request holds once so many of its tokens are computed."""
        num_pages = -(-num_tokens // self._page_size)
        pages = sum(
            (num_pages - size.family.first_needed(num_tokens)) * size.unit_bytes
            for size in self._sizes(self._demand(num_tokens))
        )
        return pages + sum(self._state_bytes)

    def most_tokens(self, num_bytes: int, max_model_len: int) -> int:
        """The longest context that this much memory can support. If every layer has a window,
        memory sets no limit; then it counts as if none had."""
        if all(family.window is not None for family in self._paged):
            return min(max_model_len, num_bytes // self.page_bytes * self._page_size)
        return self._longest(num_bytes, max_model_len)

    def _longest(self, num_bytes: int, max_model_len: int) -> int:
        """The longest request whose pages fit, at most the full length."""
        demand = self._demand(max_model_len)
        return longest_that_fits(self._sizes(demand), num_bytes, demand)

    def fit(self, num_all_pages: int, adapter_room: int, max_model_len: int) -> Sizes:
        """Split memory for this many pages of all layers, and count the states beside them. One
        request of the full length must fit, or it could never finish."""
        num_bytes = num_all_pages * self.page_bytes
        longest = self._longest(num_bytes, max_model_len)
        if longest < max_model_len:
            if self._is_asked_for:
                raise ConfigError(
                    f"--max-model-len is {max_model_len}, and the cache holds {longest} tokens of "
                    f"one request ({num_all_pages} pages of {self._page_size}). Lower it, or raise "
                    "--kv-cache-memory-bytes or --num-gpu-blocks-override."
                )
            logger.warning("context cut from %d to %d tokens: the cache holds no more",
                           max_model_len, longest)  # fmt: skip
        demand = self._demand(longest)
        units = split(self._sizes(demand), num_bytes, demand)
        num_units = [capacity.num_device_units for capacity in units]
        if self.states is not None:
            num_states = self.states.num_states(num_bytes, max_model_len)
            num_units += [num_states] * len(self._state_bytes)
        return Sizes(tuple(num_units), adapter_room, longest)

    def capacities(self, sizes: Sizes) -> tuple[Capacity, ...]:
        """The capacities for the cache."""
        paged: list[Family] = [s.family for s in self._sizes(self._demand(sizes.max_model_len))]
        worth = sum(self._state_bytes) // (self.page_bytes * LEAST_WORTH)
        states = recurrent_families(
            len(self._state_bytes), interval=self._interval, least_saved=max(1, worth)
        )
        return tuple(map(Capacity, [*paged, *states], sizes.num_units))

    def told(self, sizes: Sizes, num_ranks: int) -> list[str]:
        """Each family's share on all ranks together, and the reason, line by line."""
        demand = self._demand(sizes.max_model_len)
        own = self._sizes(demand)
        everywhere = [FamilyBytes(size.family, size.unit_bytes * num_ranks) for size in own]
        lines = told(self.capacities(sizes)[: len(own)], everywhere, demand)
        counts = [len(family.layers) for family in self._families]
        layers = ["1 layer" if n == 1 else f"{n} layers" for n in counts]
        lines = [f"{n}, {line}" for n, line in zip(layers, lines, strict=False)]
        if len(lines) > 1:
            shares = largest_shares([s.unit_bytes for s in own], [s.family for s in own], demand)
            shortest = min(SHORT, sizes.max_model_len)
            lines.append(
                "memory goes to each by the largest share that it has of a request's: of requests "
                f"of any length from {shortest} to {sizes.max_model_len} tokens, at least "
                f"{100 / float(sum(shares)):.0f}% fit of those that a split for them would hold"
            )
        states = zip(
            layers[len(own) :], self.capacities(sizes)[len(own) :], self._state_bytes, strict=True
        )
        return lines + [f"{n}, {self._told_states(c, size * num_ranks)}" for n, c, size in states]

    def _told_states(self, capacity: Capacity, state_bytes: int) -> str:
        assert self.states is not None
        num_units, num_working = capacity.num_device_units, self.states.num_working
        return (
            f"{capacity.family.name}: {num_working} working states and {num_units - num_working} "
            f"checkpoints of {state_bytes / 2**20:.3g} MiB, {num_units * state_bytes / 2**30:.2f} "
            f"GiB; one at least every {self._interval * self._page_size} tokens of a prompt"
        )

    def _demand(self, max_model_len: int) -> Demand:
        return Demand(
            page_size=self._page_size,
            max_model_len=max_model_len,
            num_step_tokens=self._num_step_tokens,
            num_chunk_tokens=self._num_chunk_tokens,
        )

    def _sizes(self, demand: Demand) -> list[FamilyBytes]:
        families = attention_families(
            [family.window for family in self._paged],
            page_size=demand.page_size,
            max_model_len=demand.max_model_len,
        )
        return [FamilyBytes(f, n) for f, n in zip(families, self._page_bytes, strict=True)]


def count_pages(
    settings: EngineSettings,
    memory: FamilyMemory,
    device: torch.device,
    *,
    reserved_bytes: int,
    max_model_len: int,
) -> int:
    """The number of pages of all layers that fit beside states. `reserved_bytes`: device memory for
    adapters and steps on a GPU."""
    cache = settings.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    page_bytes, states = memory.page_bytes, memory.states
    if cache.kv_cache_memory_bytes is not None:
        budget, size = cache.kv_cache_memory_bytes, page_bytes
    else:
        num_ranks = settings.model.tensor_parallel_size
        budget = _free_bytes(cache, device, num_ranks) - reserved_bytes
        size = max(page_bytes, LEAST_PAGE_BYTES)
    if states is not None:
        whole, budget = budget, states.pages_bytes(budget, max_model_len)
        if budget < page_bytes:
            raise ConfigError(
                f"{whole} bytes are left for the cache, and {states.num_working} states of running "
                f"requests take {states.working_bytes} of them, checkpoints some, and one page "
                f"{page_bytes}. Lower --max-num-seqs or --checkpoint-memory-bytes, or raise "
                "--kv-cache-memory-bytes or --gpu-memory-utilization."
            )
    num_pages = budget // size
    if num_pages < 1:
        raise ConfigError(
            f"{budget} bytes are left for the cache, and one page takes {page_bytes}. "
            "Raise --kv-cache-memory-bytes or --gpu-memory-utilization, or lower --block-size, "
            "--max-num-batched-tokens, --max-loras or --max-lora-rank."
        )
    return int(num_pages)


def count_adapter_room(
    settings: EngineSettings,
    *,
    slot_bytes: int,
    block_bytes: int | None,
    known_bytes: int,
    page_bytes: int,
    device: torch.device,
) -> int:
    """Room for adapters on the device: the number of slots in --max-loras plus spare ones. For
    auto, the number of blocks in adapters' share of memory, or of slots if there are no blocks.
    `known_bytes`: size of the adapters in --lora-modules."""
    lora, cache = settings.lora, settings.cache
    free = _free_bytes(cache, device, settings.model.tensor_parallel_size)
    if lora.max_loras:
        num_spare = min(lora.max_loras // SPARE_SLOTS, int(SPARE_SHARE * free) // slot_bytes)
        num_slots = lora.max_loras + max(0, num_spare)
        return min(num_slots, lora.max_cpu_loras or num_slots)
    if lora.adapter_memory_bytes is not None:
        free = lora.adapter_memory_bytes
    elif device.type == "cuda":
        pages = (cache.num_gpu_blocks_override or 0) * page_bytes
        left = free - (cache.kv_cache_memory_bytes or pages)
        wanted = max(
            int(LEAST_ADAPTER_SHARE * left),
            int(ROOM_FOR_MORE * known_bytes),
            FEW_ADAPTERS * slot_bytes,
        )
        free = min(int(MOST_ADAPTER_SHARE * left), wanted)
    if block_bytes is not None:
        return max(1, free // block_bytes)
    fit = max(1, min(settings.scheduler.max_num_seqs, free // max(slot_bytes, 1)))
    return min(fit, lora.max_cpu_loras or fit)


def with_one_memory(
    settings: EngineSettings,
    sizes: Sizes,
    memory: FamilyMemory,
    block_bytes: int | None,
    device: torch.device,
) -> Sizes:
    """Let pages and adapters use each other's memory: the first family has units for all of it, and
    lends those that adapters start with.

    Only with --adapter-memory-bytes, and not on a GPU, whose pages are one tensor that can't give a
    part back.
    """
    lora, cache = settings.lora, settings.cache
    if block_bytes is None or device.type != "cpu" or lora.adapter_memory_bytes is None:
        return sizes
    unit_bytes = memory.unit_bytes[0]
    if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
        unit_bytes = max(unit_bytes, LEAST_PAGE_BYTES)
    num_lent = -(-sizes.adapter_room * block_bytes // unit_bytes)
    first, *others = sizes.num_units
    return replace(
        sizes,
        num_units=(first + num_lent, *others),
        lent_units=num_lent,
        lent_unit_bytes=unit_bytes,
    )


def _free_bytes(cache: CacheSettings, device: torch.device, num_ranks: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - cache.gpu_memory_utilization) * total) - LIBRARY_RESERVE_BYTES
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(MAX_CPU_CACHE_BYTES, int(total * CPU_CACHE_SHARE)) // num_ranks
