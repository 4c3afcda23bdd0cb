"""Device addresses of the adapters' weights, and the adapter of each row.

A *site* is one product of the model that adapters change: a layer's qkv, o, gate_up or down. Its
*parts* are the projections in it (q, k, v). All adapters' weights are in one flat pool; a site's
table holds their offsets for each slot. Kernels follow the table. Loading an adapter writes the
pool and one row per site, so no captured graph changes.

Ranks are the adapters' own, rounded up with zeros to a multiple of `RANK_STEP`, so that rows are
whole 16-byte loads. Nothing is padded to the largest rank.

In CPU memory, sites are *transposed*: ranks are exact, and a B is stored as [rank, part size] with
its scaling applied. torch's products are a third faster with this layout. `PoolSite.b` reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.host_copy import copied_together
from manyroots.kernels.lora_ops.batch import AdapterBatch

RANK_STEP, WIDTH_STEP = 8, 16

DECODE_BLOCK_ROWS = 16
PREFILL_BLOCK_ROWS = 64
"""Most rows of one program: few, so that many programs share a decode step's work; or many, so that
a prefill reads weights seldom."""
FEW_ROWS = 512
"""Steps of up to so many rows are cut like decode steps: with many adapters, most have one or two
rows."""
TYPICAL_ADAPTERS = 8
"""Adapters of a step whose products were measured."""
MOST_TYPICAL = 2
"""Most programs that share the blocks of a step, as a multiple of its typical blocks. A graph has
room for far more blocks than most of its steps have, and programs without a block cost time. With
fewer, a step of 128 adapters takes longer."""
MOST_SINGLE_ROWS = 32
"""Up to this many rows, a program of the fused kernels has one row. Shared weights are in the
cache, and programs with several rows are large, so fewer fit on the chip at once."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolSite:
    """A product that adapters may change, and the offsets of each slot's weights in the pool.

    Compared by identity, so that weights can be kept by site.
    """

    pool: Tensor
    """[num_elements] of the model's dtype; every offset is a multiple of 8, except for an A of a
    transposed site."""
    table: Tensor
    """int64 [num_slots, columns of the kind of site]. A slot that does not change the site has
    ranks 0."""
    scalings: Tensor
    """float32 [num_slots, num_parts]; 1 if B already includes the scaling."""
    part_sizes: tuple[int, ...]
    max_rank: int
    """The largest rank that a part of any slot may have."""
    is_transposed: bool = False
    """Whether B is stored as [rank, part size], scaled. Triton's kernels do not read such sites."""

    @property
    def num_parts(self) -> int:
        return len(self.part_sizes)

    @property
    def width(self) -> int:
        """Columns of shrunk activations, enough for any slot. They are a multiple of 16, so that
        the distance between partial sums is, too: else Triton compiles kernels once more for an odd
        number of rows."""
        return -(-self.num_parts * self.max_rank // WIDTH_STEP) * WIDTH_STEP

    def b(self, offset: int, size: int, rank: int) -> Tensor:
        """A part's B [size, rank], for either layout."""
        flat = self.pool[offset : offset + size * rank]
        return flat.view(rank, size).t() if self.is_transposed else flat.view(size, rank)


@dataclass(frozen=True, slots=True, eq=False)
class LinearSite(PoolSite):
    """A dense product. `table` has 2 + 3 * num_parts columns: the offset of A [sum of ranks, in]
    and the sum of ranks. Then for each part: the start of its ranks, its rank, and the offset of
    its B [part size, rank]."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingSite(PoolSite):
    """The table of token vectors, one part. `table` has 3 columns: the offset of A [vocabulary,
    rank], the rank, and the offset of B [hidden, rank]."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The slot of each row of a step; rows of one slot are adjacent."""

    slots: Tensor
    """int32 [num_rows]; NO_ADAPTER for rows of the base model."""
    blocks: Tensor
    """int32 [max_blocks, 3]: first row, number of rows, slot. The first `num_blocks` cover every
    row, including those of the base model; the others have no rows."""
    num_blocks: Tensor
    """int32 [1], on the device: a captured graph serves any number up to `max_blocks`."""
    max_blocks: int
    batch: AdapterBatch | None = None
    """The same in the form of the torch set, if that set prepared the step."""
    on_host: np.ndarray | None = None
    """`slots` on the host, if the step was prepared there."""

    @property
    def num_programs(self) -> int:
        """Programs that take the blocks in turn."""
        return min(self.max_blocks, MOST_TYPICAL * typical_blocks(self.slots.shape[0]))

    @property
    def programs(self) -> tuple[int, int]:
        """Rows that a program of a fused kernel takes at a time, and the number of programs."""
        num_rows = self.slots.shape[0]
        if num_rows <= MOST_SINGLE_ROWS:
            return 1, num_rows
        return DECODE_BLOCK_ROWS, self.num_programs

    def between(self, first: int, last: int) -> LoraRows | None:
        """The rows [first, last) only, prepared by the torch set; None if all of them use the base
        model."""
        assert self.batch is not None, "these rows were not prepared by the torch set"
        batch = self.batch.between(first, last)
        if batch is None:
            return None
        return LoraRows.build(self.slots[first:last].numpy(), self.slots.device, batch=batch)

    def of(self, tokens: np.ndarray) -> LoraRows | None:
        """Rows with the adapters of these tokens, in any number and order; None if all of them use
        the base model."""
        assert self.on_host is not None, "the adapters of a captured step are known on the device"
        slots = self.on_host[tokens]
        if (slots == NO_ADAPTER).all():
            return None
        batch = None if self.batch is None else self.batch.with_slots(slots, self.slots.device)
        return LoraRows.build(slots, self.slots.device, batch=batch)

    @classmethod
    def build(
        cls,
        slots: Sequence[int] | np.ndarray,
        device: torch.device,
        *,
        block_rows: int | None = None,
        batch: AdapterBatch | None = None,
    ) -> LoraRows:
        """For a step whose rows are known now; the default of `block_rows` depends on their
        number."""
        wanted = np.array(slots, dtype=np.int32)
        blocks = row_blocks(wanted, block_rows or block_rows_for(len(wanted)))
        count = np.array([len(blocks)], dtype=np.int32)
        there = copied_together([wanted, blocks.reshape(-1), count], device)
        return cls(
            slots=there[0],
            blocks=there[1].view(-1, 3),
            num_blocks=there[2],
            max_blocks=len(blocks),
            batch=batch,
            on_host=wanted,
        )


@dataclass(frozen=True, slots=True)
class LoraTerm:
    """An adapter's addition to a product, as shrunk activations that the next kernel expands."""

    hidden: Tensor
    """[num_splits, num_rows, site.width]: partial sums of scaling * x A^T in float32, or one sum in
    the pool's dtype."""
    site: LinearSite
    rows: LoraRows


def block_rows_for(num_rows: int) -> int:
    """The number of rows of one adapter per program, in a step of this many rows."""
    return DECODE_BLOCK_ROWS if num_rows <= FEW_ROWS else PREFILL_BLOCK_ROWS


def most_blocks(num_rows: int, max_slots: int, block_rows: int) -> int:
    """The most blocks of a step of `num_rows` with up to `max_slots` adapters."""
    return min(num_rows, max_slots + 1 + num_rows // block_rows)


def typical_blocks(num_rows: int) -> int:
    """Blocks of rows that products are cut for: those of `TYPICAL_ADAPTERS` in a step of about so
    many rows. Not the step's own, so that the start compiles all that traffic launches."""
    size = 1 << (num_rows - 1).bit_length()
    return most_blocks(size, TYPICAL_ADAPTERS, block_rows_for(size))


def row_blocks(slots: np.ndarray, block_rows: int) -> np.ndarray:
    """Runs of equal slots, cut to at most `block_rows` rows: int32 [num_blocks, 3]."""
    changes = np.flatnonzero(np.diff(slots)) + 1
    bounds = np.concatenate(([0], changes, [len(slots)]))
    num_blocks = -(-np.diff(bounds) // block_rows)
    runs = np.repeat(np.arange(len(num_blocks)), num_blocks)
    before = np.cumsum(num_blocks) - num_blocks
    firsts = bounds[runs] + (np.arange(len(runs)) - before[runs]) * block_rows
    sizes = np.minimum(block_rows, bounds[runs + 1] - firsts)
    return np.stack((firsts, sizes, slots[firsts]), axis=1).astype(np.int32)
