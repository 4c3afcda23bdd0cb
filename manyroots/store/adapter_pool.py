"""Adapter weights on the device: one pool, a region per slot, and tables with their offsets.

Takes an adapter's host copy and a slot; gives the kernels a site for every product. A captured
graph holds the addresses of the pool and of the tables. Both therefore never move, and a load only
changes their content. This is safe without waiting: the scheduler assigns no slot that a launched
step uses, and lets no step use it before the load is acknowledged.

Without blocks, a region has memory for the largest possible adapter. With blocks (--max-loras auto)
it is only address space, and an adapter has as many blocks there as it needs. The code that decides
loads counts the blocks.

On a CPU, regions have the layout of torch's operators (`adapter_transposed.py`), which receive each
slot's weights as views. A slot then takes what its adapter needs, and nothing while it is empty.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from manyroots.errors import ConfigError
from manyroots.ids import AdapterSlot
from manyroots.kernels.fused_moe.adapters import PART_WIDTH, ExpertSite
from manyroots.kernels.lora_ops.sites import EmbeddingSite, LinearSite, PoolSite
from manyroots.kernels.lora_ops.stacks import Stacks, default_stack_bytes
from manyroots.kernels.lora_ops.weights import SlotWeights
from manyroots.lora.files.pairs import AdapterLayout
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_region import Region, lies_as_in_the_pool, rounded
from manyroots.store.adapter_sites import LoraSite, SitePart, SiteParts
from manyroots.store.adapter_tables import SiteTables, SlotRows
from manyroots.store.adapter_transposed import TransposedRegion, aligned
from manyroots.store.adapter_weights import AdapterWeights
from manyroots.store.mapped_device import MappedDevice
from manyroots.store.untouched_memory import PAGE_BYTES, UntouchedMemory

S = TypeVar("S", bound=PoolSite)
_RowsOfTwo = tuple[list[SlotRows], list[SlotRows]]
Cut = Callable[[str, int, int], tuple[int, int]]
"""Maps a target and the sizes of a pair's A and B to those of a rank's part."""


class AdapterPool:
    """The adapters that steps may use now, in memory that never moves."""

    def __init__(
        self,
        parts: SiteParts,
        *,
        num_slots: int,
        num_at_once: int | None = None,
        num_blocks: int | None = None,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        is_transposed: bool | None = None,
        max_stack_bytes: int | None = None,
    ) -> None:
        """`parts` are the model's. There is room for `num_slots` adapters of every part and rank,
        or for as many as `num_blocks` hold. `num_at_once`: the most adapters of a step; None for
        all.

        `is_transposed`: for torch's operators instead of Triton's kernels. Its default depends on
        the device, like that of `max_stack_bytes` (see `Stacks`).
        """
        self.num_slots = num_slots
        self.num_at_once = num_slots if num_at_once is None else num_at_once
        self.is_transposed = device.type == "cpu" if is_transposed is None else is_transposed
        self._parts = parts
        self._rank = max_rank if self.is_transposed else pooled_rank(max_rank)
        self._region = sum(self._elements(part, dtype) for part in parts.values())
        if device.type == "cpu":
            self._region = -(-self._region // PAGE_BYTES) * PAGE_BYTES
        self._first = 0
        """Start of the first slot's region, in elements."""
        self._host: UntouchedMemory | None = None
        self._mapped: MappedDevice | None = None
        self._pool = self._allocate(num_blocks, dtype, device)
        self._stream = _stream(device) if device.type == "cuda" else None
        self._linears = self._tables(TargetKind.LINEAR, LinearSite, lambda count: 2 + 3 * count)
        self._lookups = self._tables(TargetKind.EMBEDDING, EmbeddingSite, lambda _: 3)
        self._experts = self._tables(TargetKind.EXPERTS, ExpertSite, lambda n: PART_WIDTH * n)
        self.sites: Mapping[LoraSite, LinearSite] = self._linears.sites
        self.embedding_sites: Mapping[LoraSite, EmbeddingSite] = self._lookups.sites
        self.expert_sites: Mapping[LoraSite, ExpertSite] = self._experts.sites
        limit = default_stack_bytes(device) if max_stack_bytes is None else max_stack_bytes
        self.stacks = Stacks(limit)
        self._lock = threading.Lock()
        # Guards this and the next one: steps read them while loads change them. Only in a
        # transposed pool.
        self._weights: dict[int, SlotWeights] = {}
        self._rows: WeakKeyDictionary[AdapterLayout | AdapterWeights, _RowsOfTwo] = (
            WeakKeyDictionary()
        )
        """Of what comes by one copy: its rows of all tables in the first slot and in the second.
        Working them out takes Python longer than a GPU takes for the copy, and steps wait for
        however busy Python is."""
        if device.type == "cuda":
            # Loads use a separate stream, which does not wait for the zeros written here.
            torch.cuda.synchronize(device)

    @property
    def used_bytes(self) -> int:
        """Memory of the adapters in slots; only in a transposed pool."""
        with self._lock:
            return sum(weights.num_bytes for weights in self._weights.values())

    def weights(self, slot: int) -> SlotWeights:
        """The content of a slot, by the sites of this pool; only in a transposed pool."""
        with self._lock:
            weights = self._weights.get(slot)
        if weights is None:
            raise RuntimeError(f"a step uses adapter slot {slot}, which is empty")
        return weights

    def load(self, slot: AdapterSlot, weights: AdapterWeights) -> None:
        """Put an adapter into a slot; steps may use it when this returns."""
        unknown = sorted(set(weights.pairs) - set(self._parts))
        if unknown:
            raise RuntimeError(f"the adapter changes {unknown[0]}, which this model does not have")
        self.clear(slot)
        if self._mapped is not None:
            self._mapped.take(slot, pooled_bytes(weights, is_transposed=False))
        try:
            self._load(slot, weights)
        except BaseException:
            self.clear(slot)
            raise

    def _load(self, slot: AdapterSlot, weights: AdapterWeights) -> None:
        if self.is_transposed:
            self._place_transposed(slot, weights)
        elif self._stream is None:
            self._place(slot, weights)
        else:
            with torch.cuda.stream(self._stream):
                self._place(slot, weights)
            self._stream.synchronize()

    def clear(self, slot: AdapterSlot) -> None:
        """The content of a slot is no longer used. The next load writes its tables."""
        with self._lock:
            weights = self._weights.pop(slot, None)
        if weights is not None:
            self.stacks.forget(weights)
            self._give_back(slot)
        if self._mapped is not None:
            self._mapped.give_back(slot)

    def _place(self, slot: AdapterSlot, weights: AdapterWeights) -> None:
        memory = Region(self._pool, self._first + slot * self._region)
        form = weights.form or weights
        with self._lock:
            known = self._rows.get(form)
        if known is None and lies_as_in_the_pool(weights, self._linears.names.values()):
            known = self._rows_in(0, weights), self._rows_in(1, weights)
            with self._lock:
                self._rows[form] = known
        if known is None:
            self._write(slot, self._place_all(weights, memory))
            return
        memory.fill(weights.buffer)
        pairs = zip(*known, strict=True)
        self._write(slot, [first.moved(further, slot) for first, further in pairs])

    def _rows_in(self, slot: int, weights: AdapterWeights) -> list[SlotRows]:
        """Table rows of an adapter that has the same layout in a slot as in its host copy."""
        memory = Region(self._pool, self._first + slot * self._region)
        memory.lies_here(weights.buffer)
        return self._place_all(weights, memory)

    def _place_transposed(self, slot: AdapterSlot, weights: AdapterWeights) -> None:
        memory = TransposedRegion(self._pool, self._first + slot * self._region)
        try:
            self._write(slot, self._place_all(weights, memory))
            placed = memory.weights()
        except BaseException:
            self._give_back(slot)
            raise
        with self._lock:
            self._weights[slot] = placed

    def _place_all(
        self, weights: AdapterWeights, memory: Region | TransposedRegion
    ) -> list[SlotRows]:
        return [
            self._linears.rows(weights.pairs, memory.place),
            self._lookups.rows(weights.pairs, memory.place_embedding),
            self._experts.rows(weights.pairs, memory.place_experts),
        ]

    def _write(self, slot: AdapterSlot, rows: list[SlotRows]) -> None:
        linears, lookups, experts = rows
        self._linears.write(slot, linears)
        self._lookups.write(slot, lookups)
        self._experts.write(slot, experts)

    def _give_back(self, slot: AdapterSlot) -> None:
        if self._host is not None:
            size = self._region * self._pool.element_size()
            self._host.give_back(slot * size, size)

    def _allocate(self, num_blocks: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = self.num_slots * self._region
        try:
            if device.type != "cpu" and num_blocks is not None:
                per_region = self._region * dtype.itemsize
                self._mapped = MappedDevice(self.num_slots, per_region, num_blocks, device)
                self._region = self._mapped.region_bytes // dtype.itemsize
                self._first = self._mapped.start(0) // dtype.itemsize
                return self._mapped.data.view(dtype)
            if device.type != "cpu":
                return torch.zeros(size, dtype=dtype, device=device)
            self._host = UntouchedMemory(size * dtype.itemsize, is_counted=num_blocks is None)
            return self._host.data.view(dtype)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"{self.num_slots} adapters of rank {self._rank} in every weight take "
                f"{size * dtype.itemsize / 2**30:.1f} GiB on {device}, and it does not have them; "
                "lower --max-loras or --max-lora-rank."
            ) from error

    def _tables(
        self, kind: TargetKind, make: type[S], width: Callable[[int], int]
    ) -> SiteTables[S]:
        names: dict[LoraSite, list[str]] = {}
        for name, part in self._parts.items():
            if part.site.kind is kind:
                names.setdefault(part.site, []).append(name)
        return SiteTables(
            make,
            names,
            self._parts,
            pool=self._pool,
            num_slots=self.num_slots,
            max_rank=self._rank,
            width=width,
            is_transposed=self.is_transposed,
        )

    def _elements(self, part: SitePart, dtype: torch.dtype) -> int:
        """Elements of A and B of a part at the highest rank."""
        target = part.target
        count = self._rank * (target.num_experts or 1)
        halves = (count * target.in_features, count * target.out_features)
        if self.is_transposed:
            return sum(aligned(half, dtype) for half in halves)
        return sum(rounded(half) for half in halves)


def pooled_bytes(weights: AdapterWeights, *, is_transposed: bool, cut: Cut | None = None) -> int:
    """Bytes of an adapter in the pool. `cut`: a rank's part of each pair."""
    dtype, total = weights.buffer.dtype, 0
    for name, rank, *halves in _half_sizes(weights):
        for size in halves if cut is None else cut(name, *halves):
            if is_transposed:
                total += aligned(size, dtype)
            else:
                total += rounded(size // rank * pooled_rank(rank))
    return total * dtype.itemsize


def _half_sizes(weights: AdapterWeights) -> Iterator[tuple[str, int, int, int]]:
    """Sizes of each pair, without reading it if the form is known."""
    if weights.form is not None:
        for pair in weights.form.pairs:
            yield pair.target, pair.rank, math.prod(pair.a_shape), math.prod(pair.b_shape)
        return
    for name, found in weights.pairs.items():
        yield name, found.rank, found.a.numel(), found.b.numel()


def pooled_rank(rank: int) -> int:
    """The padded rank of an adapter of this rank on a GPU."""
    return rounded(rank)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has none here
