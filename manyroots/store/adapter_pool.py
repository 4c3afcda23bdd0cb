"""Adapter weights on a GPU: one pool, one region per slot, and tables that say what lies where.

Takes an adapter's host copy and a slot; gives the kernels a `LoraSite` for every product. A
captured graph holds the addresses of the pool and of the tables, so both stay where they are for
good, and a load only changes what they hold. That is safe without waiting: whoever decides loads
gives no slot that a launched step uses, and lets no step use it before the load is answered.

Next to `adapter_slots.py`, which gives torch's operators one tensor per adapter and product.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.kernels.lora_sites.sites import RANK_STEP, LoraRows, LoraSite
from manyroots.kernels.moe_pairs.adapters import PART_WIDTH, ExpertSite
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_sites import LoraSite as HostSite
from manyroots.store.adapter_sites import SitePart, SiteParts
from manyroots.store.adapter_weights import AdapterWeights, LoraPair

HEAD = "lm_head"
"""The head's name among the parts. It is computed for few rows of a step, and apart."""


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What one adapter adds to the embedding: scaling * B A[token]."""

    a: Tensor
    b: Tensor
    scaling: float


class AdapterPool:
    """The adapters that steps may use now, in memory that never moves."""

    def __init__(
        self,
        parts: SiteParts,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts` are the model's. Room is for `num_slots` adapters of every part and rank."""
        self.num_slots = num_slots
        self._parts = parts
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        self._rank = pooled_rank(max_rank)
        self._region = sum(_elements(part, self._rank) for part in parts.values())
        self._pool = torch.zeros(num_slots * self._region, dtype=dtype, device=device)
        names: dict[HostSite, list[str]] = {}
        for name, part in parts.items():
            names.setdefault(part.site, []).append(name)
        self._linears = {s: n for s, n in names.items() if s.kind is TargetKind.LINEAR}
        self._experts = {s: n for s, n in names.items() if s.kind is TargetKind.EXPERTS}
        counts = [len(n) for n in self._linears.values()]
        self._tables = _Tables(num_slots, [2 + 3 * n for n in counts], counts, device)
        self.sites: Mapping[HostSite, LoraSite] = {
            site: LoraSite(
                pool=self._pool,
                table=self._tables.offsets[index],
                scalings=self._tables.scalings[index],
                part_sizes=tuple(parts[name].target.out_features for name in names),
                max_rank=self._rank,
            )
            for index, (site, names) in enumerate(self._linears.items())
        }
        counts = [len(n) for n in self._experts.values()]
        self._expert_tables = _Tables(num_slots, [PART_WIDTH * n for n in counts], counts, device)
        self.expert_sites: Mapping[HostSite, ExpertSite] = {
            site: ExpertSite(
                pool=self._pool,
                table=self._expert_tables.offsets[index],
                scalings=self._expert_tables.scalings[index],
                part_sizes=tuple(parts[name].target.out_features for name in names),
                max_rank=self._rank,
            )
            for index, (site, names) in enumerate(self._experts.items())
        }
        self._lock = threading.Lock()
        # Both are guarded by it: steps read them while loads change them.
        self._lookups: dict[int, _Lookup] = {}
        self._changes_head: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Memory of the pool, whatever is in it."""
        return self._pool.numel() * self._pool.element_size()

    def is_plain(self, slots: np.ndarray) -> bool:
        """Whether none of these slots' adapters changes the embedding or the head."""
        with self._lock:
            odd = self._lookups.keys() | self._changes_head
        return not odd or odd.isdisjoint(slots.tolist())

    def load(self, slot: AdapterSlot, weights: AdapterWeights) -> None:
        """Put an adapter into a slot; when this returns, steps may use it."""
        unknown = sorted(set(weights.pairs) - set(self._parts))
        if unknown:
            raise RuntimeError(f"the adapter changes {unknown[0]}, which this model does not have")
        self.clear(slot)
        if self._stream is None:
            self._place(slot, weights)
            return
        with torch.cuda.stream(self._stream):
            self._place(slot, weights)
        self._stream.synchronize()

    def clear(self, slot: AdapterSlot) -> None:
        """Nobody uses what is in a slot any more. Its tables are the next load's to write."""
        with self._lock:
            self._lookups.pop(slot, None)
            self._changes_head.discard(slot)

    def add_embedding(self, y: Tensor, tokens: Tensor, rows: LoraRows) -> None:
        """Add to y [num_tokens, hidden] what adapters change of the embedding; asks the device
        for the slots."""
        with self._lock:
            lookups = dict(self._lookups)
        for slot, lookup in lookups.items():
            mine = (rows.slots == slot).nonzero()[:, 0]
            if len(mine):
                h = F.embedding(tokens[mine], lookup.a)
                y[mine] += F.linear(h, lookup.b) * lookup.scaling

    def _place(self, slot: AdapterSlot, weights: AdapterWeights) -> None:
        pairs = weights.pairs
        memory = _Region(self._pool, slot * self._region)
        for sites, tables, place in (
            (self._linears, self._tables, memory.place),
            (self._experts, self._expert_tables, memory.place_experts),
        ):
            found = [[pairs.get(name) for name in names] for names in sites.values()]
            scalings = [[0.0 if pair is None else pair.scaling for pair in row] for row in found]
            tables.write(slot, [place(row) for row in found], scalings)
        lookups = [
            _Lookup(memory.take(pairs[name].a), memory.take(pairs[name].b), pairs[name].scaling)
            for name, part in self._parts.items()
            if part.site.kind is TargetKind.EMBEDDING and name in pairs
        ]
        with self._lock:
            if lookups:
                [self._lookups[slot]] = lookups
            if HEAD in pairs:
                self._changes_head.add(slot)


class _Region:
    """A slot's memory, handed out piece by piece."""

    def __init__(self, pool: Tensor, start: int) -> None:
        self._pool = pool
        self._next = start

    def place(self, found: list[LoraPair | None]) -> list[int]:
        """A site's parts; gives its row of the table (see `LoraSite.table`)."""
        ranks = [0 if pair is None else _rounded(pair.rank) for pair in found]
        if not any(ranks):
            return [0] * (2 + 3 * len(found))
        a_offset, total = self._next, sum(ranks)
        for pair, rank in zip(found, ranks, strict=True):
            if pair is not None:
                self._copy((rank, pair.a.shape[1]), pair.a)
        row, start = [a_offset, total], 0
        for pair, rank in zip(found, ranks, strict=True):
            row += [start, rank, self._next]
            if pair is not None:
                self._copy((pair.b.shape[0], rank), pair.b)
            start += rank
        return row

    def place_experts(self, found: list[LoraPair | None]) -> list[int]:
        """The same of experts; gives the site's row of `ExpertSite.table`."""
        row = []
        for pair in found:
            if pair is None:
                row += [0] * PART_WIDTH
                continue
            rank = _rounded(pair.rank)
            for half, shape in (
                (pair.a, (pair.a.shape[0], rank, pair.a.shape[2])),
                (pair.b, (pair.b.shape[0], pair.b.shape[1], rank)),
            ):
                step = 0 if shape[0] == 1 else shape[1] * shape[2]
                row += [self._next, step] if half is pair.b else [self._next, step, rank]
                self._copy(shape, half)
        return row

    def take(self, tensor: Tensor) -> Tensor:
        """A copy of one matrix."""
        rows, columns = tensor.shape
        return self._copy((rows, _rounded(columns)), tensor)[:, :columns]

    def _copy(self, shape: tuple[int, ...], tensor: Tensor) -> Tensor:
        size = math.prod(shape)
        place = self._pool[self._next : self._next + size].view(shape)
        self._next += _rounded(size)
        # From page-locked memory, and nobody waits for one piece: `load` does for all of them.
        if place.shape == tensor.shape:
            return place.copy_(tensor, non_blocking=True)
        place.zero_()
        whole = tensor.to(place.device, non_blocking=True)
        place[tuple(slice(size) for size in tensor.shape)].copy_(whole)
        return place


class _Tables:
    """The tables of all sites in one piece of memory each, so that a load is one write."""

    def __init__(
        self, num_slots: int, widths: list[int], counts: list[int], device: torch.device
    ) -> None:
        """Of each site: how wide a slot's row of offsets is, and how many scalings it has."""
        self._device = device
        self._widths, self._counts = widths, counts
        self._num_slots = num_slots
        self._offsets = torch.zeros(num_slots * sum(widths), dtype=torch.int64, device=device)
        self._scalings = torch.zeros(num_slots * sum(counts), device=device)
        self.offsets = _cut(self._offsets, num_slots, widths)
        self.scalings = _cut(self._scalings, num_slots, counts)

    def write(self, slot: int, entries: list[list[int]], scalings: list[list[float]]) -> None:
        """A slot's row of every site."""
        if not entries:
            return
        for target, widths, rows, kind in (
            (self._offsets, self._widths, entries, np.int64),
            (self._scalings, self._counts, scalings, np.float32),
        ):
            values = np.concatenate([np.asarray(row, kind) for row in rows])
            at = torch.from_numpy(_places(self._num_slots, widths, slot)).to(self._device)
            target.index_copy_(0, at, torch.from_numpy(values).to(self._device))


def _places(num_slots: int, widths: list[int], slot: int) -> np.ndarray:
    """Where a slot's rows lie in the flat memory of all tables."""
    starts = np.concatenate(([0], np.cumsum(widths)[:-1])) * num_slots
    pieces = [
        start + slot * width + np.arange(width) for start, width in zip(starts, widths, strict=True)
    ]
    return np.concatenate(pieces).astype(np.int64)


def _cut(flat: Tensor, num_slots: int, widths: list[int]) -> list[Tensor]:
    pieces = torch.split(flat, [num_slots * width for width in widths])
    return [p.view(num_slots, width) for p, width in zip(pieces, widths, strict=True)]


def _elements(part: SitePart, rank: int) -> int:
    target = part.target
    one = _rounded(rank * target.in_features) + _rounded(rank * target.out_features)
    return one * (target.num_experts or 1)


def pooled_rank(rank: int) -> int:
    """What an adapter of this rank takes the memory of."""
    return _rounded(rank)


def _rounded(size: int) -> int:
    return -(-size // RANK_STEP) * RANK_STEP


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has none here
