"""Adapter weights on a GPU: one pool, one region per slot, and tables that say what lies where.

Takes an adapter's host copy and a slot; gives the kernels a `LinearSite` for every product. A
captured graph holds the addresses of the pool and of the tables, so both stay where they are for
good, and a load only changes what they hold. That is safe without waiting: whoever decides loads
gives no slot that a launched step uses, and lets no step use it before the load is answered.

Next to `adapter_slots.py`, which gives torch's operators one tensor per adapter and product.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.kernels.lora_sites.sites import LinearSite, LoraRows
from manyroots.kernels.moe_pairs.adapters import PART_WIDTH, ExpertSite
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_region import Region, lies_as_in_the_pool, rounded
from manyroots.store.adapter_sites import LoraSite, SitePart, SiteParts
from manyroots.store.adapter_weights import AdapterWeights

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
        names: dict[LoraSite, list[str]] = {}
        for name, part in parts.items():
            names.setdefault(part.site, []).append(name)
        self._linears = {s: n for s, n in names.items() if s.kind is TargetKind.LINEAR}
        self._experts = {s: n for s, n in names.items() if s.kind is TargetKind.EXPERTS}
        counts = [len(n) for n in self._linears.values()]
        self._tables = _Tables(num_slots, [2 + 3 * n for n in counts], counts, device)
        self.sites: Mapping[LoraSite, LinearSite] = {
            site: LinearSite(
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
        self.expert_sites: Mapping[LoraSite, ExpertSite] = {
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
        memory = Region(self._pool, slot * self._region)
        if lies_as_in_the_pool(weights, self._linears.values()):
            memory.fill(weights.buffer)
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


class _Tables:
    """The tables of all sites in one piece of memory each, so that a load is one write."""

    def __init__(
        self, num_slots: int, widths: list[int], counts: list[int], device: torch.device
    ) -> None:
        """Of each site: how wide a slot's row of offsets is, and how many scalings it has."""
        self._device = device
        self._offsets = torch.zeros(num_slots * sum(widths), dtype=torch.int64, device=device)
        self._scalings = torch.zeros(num_slots * sum(counts), device=device)
        self._offset_places = _Places(num_slots, widths)
        self._scaling_places = _Places(num_slots, counts)
        self.offsets = _cut(self._offsets, num_slots, widths)
        self.scalings = _cut(self._scalings, num_slots, counts)

    def write(self, slot: int, entries: list[list[int]], scalings: list[list[float]]) -> None:
        """A slot's row of every site."""
        if not entries:
            return
        offsets = np.array(list(chain.from_iterable(entries)), np.int64)
        factors = np.array(list(chain.from_iterable(scalings)), np.float32)
        for target, places, values in (
            (self._offsets, self._offset_places, offsets),
            (self._scalings, self._scaling_places, factors),
        ):
            at = torch.from_numpy(places.of(slot)).to(self._device)
            target.index_copy_(0, at, torch.from_numpy(values).to(self._device))


class _Places:
    """Where the rows of a slot lie in the flat memory of all tables."""

    def __init__(self, num_slots: int, widths: list[int]) -> None:
        per_site = np.array(widths, np.int64)
        before = np.cumsum(per_site) - per_site
        within = np.arange(per_site.sum()) - np.repeat(before, per_site)
        self._first = np.repeat(before * num_slots, per_site) + within
        self._width = np.repeat(per_site, per_site)

    def of(self, slot: int) -> np.ndarray:
        places: np.ndarray = self._first + slot * self._width
        return places


def _cut(flat: Tensor, num_slots: int, widths: list[int]) -> list[Tensor]:
    pieces = torch.split(flat, [num_slots * width for width in widths])
    return [p.view(num_slots, width) for p, width in zip(pieces, widths, strict=True)]


def _elements(part: SitePart, rank: int) -> int:
    target = part.target
    one = rounded(rank * target.in_features) + rounded(rank * target.out_features)
    return one * (target.num_experts or 1)


def pooled_rank(rank: int) -> int:
    """What an adapter of this rank takes the memory of."""
    return rounded(rank)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has none here
