"""One slot's part of the pool for torch's operators, on a CPU.

Takes a host copy's pairs, site by site; gives table rows, as `adapter_region.py` does, and the
slot's weights as views. Ranks are exact. B is stored transposed and pre-scaled: a CPU's products
are a third faster with it. The A of a product's parts are adjacent, per expert if experts have
their own, so that they are one product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.kernels.fused_moe.adapters import PART_WIDTH, ExpertSite
from manyroots.kernels.lora_ops.sites import EmbeddingSite, LinearSite
from manyroots.kernels.lora_ops.weights import LowRank, Part, Site, SlotWeights
from manyroots.store.adapter_weights import LoraPair

ALIGNMENT_BYTES = 64
"""Alignment of a tensor: a cache line, and enough for wide loads."""

FoundPairs = Sequence[LoraPair | None]
"""An adapter's pairs for the parts of one site."""


def aligned(size: int, dtype: torch.dtype) -> int:
    """The number of elements that a tensor of `size` takes."""
    step = ALIGNMENT_BYTES // dtype.itemsize
    return -(-size // step) * step


class TransposedRegion:
    """A slot's memory, handed out piece by piece."""

    def __init__(self, pool: Tensor, start: int) -> None:
        self._pool = pool
        self._start = self._next = start
        self._linears: dict[Site, LowRank] = {}
        self._lookups: dict[Site, LowRank] = {}
        self._experts: dict[Site, tuple[LowRank, ...]] = {}

    def weights(self) -> SlotWeights:
        """All placed weights; raises AdapterError if not all are finite."""
        buffer = self._pool[self._start : self._next]
        # In a masked or padded product, an infinite weight would spoil its neighbours.
        if not _is_finite(buffer):
            raise AdapterError(
                f"the adapter's weights, scaled, are not all finite as {buffer.dtype}; use a "
                "--dtype with a wider range."
            )
        single = (*self._linears.values(), *self._lookups.values())
        lows = [*single, *(low for group in self._experts.values() for low in group)]
        return SlotWeights(
            linears=self._linears,
            lookups=self._lookups,
            experts=self._experts,
            rank=max((low.rank for low in lows), default=0),
            buffer=buffer,
        )

    def place(self, site: LinearSite, found: FoundPairs) -> list[int]:
        """Place a site's parts; returns its row of the table (see `LinearSite.table`)."""
        pairs = _present(found)
        if not pairs:
            return [0] * (2 + 3 * len(found))
        total = sum(pair.rank for pair in pairs.values())
        a = self._take((total, pairs[min(pairs)].a.shape[1]))
        row, parts, start = [_offset(a), total], [], 0
        for index, columns in enumerate(_columns(site.part_sizes)):
            pair = pairs.get(index)
            if pair is None:
                row += [start, 0, 0]
                continue
            ranks = slice(start, start + pair.rank)
            a[ranks] = pair.a
            b = self._take_b(pair)
            parts.append(Part(ranks, columns, b))
            row += [start, pair.rank, _offset(b)]
            start = ranks.stop
        self._linears[site] = LowRank(a, tuple(parts), sum(site.part_sizes))
        return row

    def place_embedding(self, site: EmbeddingSite, found: FoundPairs) -> list[int]:
        """The same for an embedding (see `EmbeddingSite.table`)."""
        [pair] = found
        if pair is None:
            return [0] * 3
        a = self._take(tuple(pair.a.shape)).copy_(pair.a)
        b = self._take_b(pair)
        [columns] = _columns(site.part_sizes)
        self._lookups[site] = LowRank(a, (Part(slice(pair.rank), columns, b),), b.shape[1])
        return [_offset(a), pair.rank, _offset(b)]

    def place_experts(self, site: ExpertSite, found: FoundPairs) -> list[int]:
        """The same for experts (see `ExpertSite.table`)."""
        pairs = _present(found)
        rows = [[0] * PART_WIDTH for _ in found]
        lows = []
        # Together, but weights that experts share are separate from each expert's own.
        for count in dict.fromkeys(pair.a.shape[0] for pair in pairs.values()):
            alike = {index: pair for index, pair in pairs.items() if pair.a.shape[0] == count}
            lows.append(self._place_alike(site, alike, rows))
        if lows:
            self._experts[site] = tuple(lows)
        return [entry for row in rows for entry in row]

    def _place_alike(
        self, site: ExpertSite, pairs: dict[int, LoraPair], rows: list[list[int]]
    ) -> LowRank:
        """Parts with equally many A; writes their entries into `rows`."""
        total = sum(pair.rank for pair in pairs.values())
        count, _, width = pairs[min(pairs)].a.shape
        a = self._take((count, total, width))
        parts, start = [], 0
        columns = _columns(site.part_sizes)
        for index, pair in pairs.items():
            ranks = slice(start, start + pair.rank)
            a[:, ranks] = pair.a
            b = self._take_b(pair)
            parts.append(Part(ranks, columns[index], b))
            rows[index] = [_offset(a) + start * width, _step(a), pair.rank, _offset(b), _step(b)]
            start = ranks.stop
        return LowRank(a, tuple(parts), sum(site.part_sizes))

    def _take_b(self, pair: LoraPair) -> Tensor:
        """A B [..., out, rank], scaled, as [..., rank, out]."""
        transposed = pair.b.transpose(-1, -2)
        return torch.mul(transposed, pair.scaling, out=self._take(tuple(transposed.shape)))

    def _take(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        piece = self._pool[self._next : self._next + size].view(shape)
        self._next += aligned(size, self._pool.dtype)
        return piece


def _is_finite(buffer: Tensor) -> bool:
    """Without a copy, which would be as large."""
    if buffer.numel() == 0:
        return True
    low, high = torch.aminmax(buffer)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _present(found: FoundPairs) -> dict[int, LoraPair]:
    """By their index among the parts."""
    return {index: pair for index, pair in enumerate(found) if pair is not None}


def _columns(part_sizes: tuple[int, ...]) -> list[slice]:
    """Columns of a product's parts, one after the other."""
    ends = [sum(part_sizes[: index + 1]) for index in range(len(part_sizes))]
    return [slice(end - size, end) for end, size in zip(ends, part_sizes, strict=True)]


def _offset(piece: Tensor) -> int:
    """Offset in the pool, which starts where its memory does."""
    return int(piece.storage_offset())


def _step(stack: Tensor) -> int:
    """Distance from one expert's matrix to the next; 0 if all share it."""
    return 0 if stack.shape[0] == 1 else stack.stride(0)
