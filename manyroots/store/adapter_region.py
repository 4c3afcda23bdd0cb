"""One slot's region of a GPU's pool, which receives an adapter's weights whole or piece by piece.

Takes a host copy's pairs, site by site; gives table rows with their offsets. A host copy whose
ranks are multiples of `RANK_STEP`, as read from files, already has the slot's layout and is copied
at once. Any other is copied tensor by tensor and padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor

from manyroots.kernels.fused_moe.adapters import PART_WIDTH, ExpertSite
from manyroots.kernels.lora_ops.sites import RANK_STEP, EmbeddingSite, LinearSite
from manyroots.store.adapter_weights import AdapterWeights, LoraPair
from manyroots.store.host_memory import within_borders


def rounded(size: int) -> int:
    return -(-size // RANK_STEP) * RANK_STEP


def lies_as_in_the_pool(weights: AdapterWeights, linears: Iterable[list[str]]) -> bool:
    """Whether the host copy already has the layout of a slot."""
    pairs = weights.pairs
    for pair in pairs.values():
        for half in (pair.a, pair.b):
            at = half.storage_offset() - weights.buffer.storage_offset()
            if pair.rank % RANK_STEP or at % RANK_STEP or not half.is_contiguous():
                return False
    for names in linears:
        halves = [pairs[name].a for name in names if name in pairs]
        for one, after in pairwise(halves):
            if one.storage_offset() + one.numel() != after.storage_offset():
                return False
    return True


class Region:
    """A slot's memory: filled at once, or handed out piece by piece."""

    def __init__(self, pool: Tensor, start: int) -> None:
        self._pool = pool
        self._next = start
        self._shift: int | None = None
        """From an offset in the host copy to the offset in the pool, if both have the same
        layout."""

    def fill(self, buffer: Tensor) -> None:
        """Copy a whole host copy; its pieces are then in place."""
        _copy(self._pool[self._next : self._next + buffer.numel()], buffer)

    def lies_here(self, buffer: Tensor) -> None:
        """Everything placed from now on is already here, with the layout of its host copy."""
        self._shift = self._next - int(buffer.storage_offset())

    def place(self, site: LinearSite, found: list[LoraPair | None]) -> list[int]:
        """Place a site's parts; returns its row of the table (see `LinearSite.table`)."""
        ranks = [0 if pair is None else rounded(pair.rank) for pair in found]
        if not any(ranks):
            return [0] * (2 + 3 * len(found))
        a_offsets = [
            self._put((rank, pair.a.shape[1]), pair.a)
            for pair, rank in zip(found, ranks, strict=True)
            if pair is not None
        ]
        row, start = [a_offsets[0], sum(ranks)], 0
        for pair, rank in zip(found, ranks, strict=True):
            b_offset = 0 if pair is None else self._put((pair.b.shape[0], rank), pair.b)
            row += [start, rank, b_offset]
            start += rank
        return row

    def place_experts(self, site: ExpertSite, found: list[LoraPair | None]) -> list[int]:
        """The same for experts; returns the site's row of `ExpertSite.table`."""
        row = []
        for pair in found:
            if pair is None:
                row += [0] * PART_WIDTH
                continue
            rank = rounded(pair.rank)
            a_shape = (pair.a.shape[0], rank, pair.a.shape[2])
            b_shape = (pair.b.shape[0], pair.b.shape[1], rank)
            row += [self._put(a_shape, pair.a), _step(a_shape), rank]
            row += [self._put(b_shape, pair.b), _step(b_shape)]
        return row

    def place_embedding(self, site: EmbeddingSite, found: list[LoraPair | None]) -> list[int]:
        """The same for an embedding (see `EmbeddingSite.table`)."""
        [pair] = found
        if pair is None:
            return [0] * 3
        rank = rounded(pair.rank)
        a_offset = self._put((pair.a.shape[0], rank), pair.a)
        return [a_offset, rank, self._put((pair.b.shape[0], rank), pair.b)]

    def _put(self, shape: tuple[int, ...], tensor: Tensor) -> int:
        """Store a tensor in memory of this shape, padded with zeros; returns its offset."""
        if self._shift is not None:
            return int(tensor.storage_offset()) + self._shift
        at, size = self._next, math.prod(shape)
        place = self._pool[at : at + size].view(shape)
        self._next += rounded(size)
        # From page-locked memory, without waiting for each piece: `load` waits for all of them.
        if place.shape == tensor.shape:
            _copy(place, tensor)
            return at
        place.zero_()
        whole = place.new_empty(tensor.shape)
        _copy(whole, tensor)
        place[tuple(slice(size) for size in tensor.shape)].copy_(whole)
        return at


def _step(shape: tuple[int, ...]) -> int:
    """Distance from one expert's matrix to the next; 0 if all share it."""
    return 0 if shape[0] == 1 else shape[1] * shape[2]


def _copy(place: Tensor, source: Tensor) -> None:
    """Copy from host memory, without waiting if it is page-locked."""
    if not source.is_contiguous():
        place.copy_(source, non_blocking=True)
        return
    at = 0
    for piece in within_borders(source.view(-1)):
        place.view(-1)[at : at + len(piece)].copy_(piece, non_blocking=True)
        at += len(piece)
