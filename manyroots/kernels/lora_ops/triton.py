"""Shrink, expand and embeddings in Triton, one launch for all adapters of a step.

Same signatures as `reference.py`. A program takes a block of rows with the same slot, so an
adapter's weights are read once per block. The fused kernels also call `expand_tile` to add an
adapter's part to a tile that they compute, for a block of rows or for one row. A block of one row
is treated as such. If every row has its own adapter, a step mostly reads B: programs should then be
small, so that many of them wait for memory at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import (
    counters,
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_inputs,
)
from manyroots.kernels.limits import NUM_COUNTERS
from manyroots.kernels.lora_ops.reference import prepare
from manyroots.kernels.lora_ops.sites import (
    DECODE_BLOCK_ROWS,
    FEW_ROWS,
    PREFILL_BLOCK_ROWS,
    RANK_STEP,
    EmbeddingSite,
    LinearSite,
    LoraRows,
    LoraTerm,
)

__all__ = ["add_embedding", "complete", "expand", "prepare", "shrink"]

LEAST_RANKS, MOST_RANKS = 16, 64
"""Ranks that are multiplied at once; the first is the smallest inner dimension of a matrix
instruction."""
STEP_OF_RANKS = tl.constexpr(RANK_STEP)
SINGLE_ROWS = 4
"""Without matrix instructions, so many rows with an adapter of at most RANK_STEP ranks are computed
one by one. A matrix instruction takes sixteen, and all that follows it would be computed for
sixteen, too."""
WIDE_TILES = 256
"""More tiles of columns than any product has except the head's, which most adapters do not
change."""
WIDE_PROGRAMS = 2048
"""Programs for those products: enough to keep a GPU busy, few enough to exit at once."""
LONG_STEP_BYTES, SHORT_STEP_BYTES = 512, 256
"""Inner dimension per iteration of a shrinking program; with few programs, iterations are long."""
MORE_ROWS = 2048
"""Steps of more than FEW_ROWS and up to so many rows have too few blocks for a chip."""
SHRINK_PROGRAMS = 264
"""Most programs of a shrink: two per multiprocessor of an H200. A graph has room for far more
blocks of rows than most of its steps have, and programs without work cost time, too."""
EXPAND_FEW, EXPAND_MANY = (16, 512), (32, 128)
"""Rows and columns of a product per adding program. In a step of few rows with many adapters, a
block has one or two rows, and programs should be few; large ranks leave no room for so many
columns."""
COMPLETED_COLUMNS = 128
"""Columns of a product per program that completes it."""
LOOKUP_COLUMNS = 256
"""Columns of a vector per program that adds to embeddings."""


@triton.jit
def scale_of(scalings, table, slot, columns, NUM_PARTS: tl.constexpr):
    """The scaling of each of these columns of the shrunk activations."""
    scale = tl.load(scalings + slot * NUM_PARTS)
    row = table + slot * (2 + 3 * NUM_PARTS)
    scales = tl.zeros_like(columns).to(tl.float32) + scale
    for part in tl.static_range(1, NUM_PARTS):
        start = tl.load(row + 2 + 3 * part)
        scale = tl.load(scalings + slot * NUM_PARTS + part)
        scales = tl.where(columns >= start, scale, scales)
    return scales


@triton.jit
def block_at(blocks, index):
    """A block's first row, its number of rows, and their slot."""
    first = tl.load(blocks + 3 * index)
    count = tl.load(blocks + 3 * index + 1)
    slot = tl.load(blocks + 3 * index + 2)
    return first, count, slot


@triton.jit
def part_of(pool, table, slot, part, NUM_PARTS: tl.constexpr):
    """The start of a slot's part among the ranks, its rank, and its B. NO_ADAPTER has rank 0."""
    entry = table + tl.maximum(slot, 0) * (2 + 3 * NUM_PARTS) + 2 + 3 * part
    start = tl.multiple_of(tl.load(entry).to(tl.int32), 8)
    rank = tl.load(entry + 1).to(tl.int32)
    rank = tl.multiple_of(tl.where(slot >= 0, rank, 0), 8)
    return start, rank, pool + tl.multiple_of(tl.load(entry + 2), 8)


@triton.jit
def ranks_of(b, rank, first, cols, RANK_BLOCK: tl.constexpr):
    """B[cols] of the ranks from `first` on, [cols, RANK_BLOCK]; zero past the rank."""
    r = first + tl.arange(0, RANK_BLOCK)
    return tl.load(b + cols[:, None] * rank + r[None, :], mask=(r < rank)[None, :], other=0.0)


@triton.jit
def early_ranks(
    b, rank, cols, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Load `ranks_of` 0 before a kernel's inputs are ready, and prefetch the others into the
    cache."""
    if MAX_RANK > RANK_BLOCK:
        for first in range(RANK_BLOCK, rank, RANK_BLOCK):
            prefetch(b + cols * rank + first, DEPENDENT)
    return ranks_of(b, rank, 0, cols, RANK_BLOCK)


@triton.jit
def shrunk(
    first, start, rank, hidden, hidden_split, hidden_row, rows, row_ok, b,
    NUM_SPLITS: tl.constexpr, RANK_BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden[rows] of the ranks from `first` on, in the dtype of B; zero past the rank."""
    r = first + tl.arange(0, RANK_BLOCK)
    at = hidden + rows[:, None] * hidden_row + start + r[None, :]
    ok = row_ok[:, None] & (r < rank)[None, :]
    h = tl.load(at, mask=ok, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        h += tl.load(at + split * hidden_split, mask=ok, other=0.0)
    return h.to(b.dtype.element_ty)


@triton.jit
def expand_tile(
    acc, first_hidden, first_ranks, b, start, rank, cols, hidden, hidden_split, hidden_row, rows,
    row_ok,
    NUM_SPLITS: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
):  # fmt: skip
    """acc + hidden[rows] B[cols]^T. `cols` count from the part's first column; `first_ranks` come
    from `early_ranks`, and `first_hidden` are the same ranks of `shrunk`. A program loads all of
    these before it multiplies any, since nothing is loaded earlier than the product before it.
    No rank is above MAX_RANK: if RANK_BLOCK is as large, there is no loop, and all loads are in
    flight at once.

    One row is multiplied elementwise and summed: a matrix instruction would need sixteen rows and
    another order of the weight. Several rows are added to `acc` after their product: as
    accumulators of the product they would need two layout conversions. The compiler would remove a
    constant zero as the accumulator.
    """
    h = first_hidden
    total = tl.broadcast_to((row_ok.to(tl.float32) * 0.0)[:, None], acc.shape)
    if acc.shape[0] == 1:
        total = tl.sum(h.to(tl.float32) * first_ranks.to(tl.float32), axis=1)[None, :]
    else:
        total = tl.dot(h, tl.trans(first_ranks), total, input_precision="ieee")
    if MAX_RANK > RANK_BLOCK:
        for first in range(RANK_BLOCK, rank, RANK_BLOCK):
            weight = ranks_of(b, rank, first, cols, RANK_BLOCK)
            h = shrunk(
                first, start, rank, hidden, hidden_split, hidden_row, rows, row_ok, b, NUM_SPLITS,
                RANK_BLOCK,
            )  # fmt: skip
            if acc.shape[0] == 1:
                total += tl.sum(h.to(tl.float32) * weight.to(tl.float32), axis=1)[None, :]
            else:
                total = tl.dot(h, tl.trans(weight), total, input_precision="ieee")
    return acc + total


def rank_constants(site: LinearSite) -> dict[str, int]:
    """Constants of a kernel that calls `expand_tile`. All ranks at once if possible: a loop would
    not load ahead."""
    block = min(MOST_RANKS, max(LEAST_RANKS, triton.next_power_of_2(site.max_rank)))
    return {"RANK_BLOCK": block, "MAX_RANK": site.max_rank}


def has_few_ranks(site: LinearSite) -> bool:
    """Whether B's tiles are so narrow that a program has room for many columns."""
    return site.max_rank <= LEAST_RANKS


def single_rows_of(site: LinearSite, num_rows: int, num_sums: int) -> int:
    """Up to how many rows of a block a fused kernel computes one by one. Steps of more than
    FEW_ROWS have few such blocks. Partial sums of several rows would not fit into registers."""
    is_short = num_sums == 1 and site.max_rank <= RANK_STEP
    return SINGLE_ROWS if num_rows <= FEW_ROWS and is_short else 1


NO_RANKS = {"RANK_BLOCK": LEAST_RANKS, "MAX_RANK": 0}
"""The same for a launch without adapters."""


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    x, hidden, partial, counters, pool, table, scalings, blocks, num_blocks, num_rows, k_size,
    width,
    NUM_PARTS: tl.constexpr, NUM_TILES: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Shrink a block of rows by a tile of ranks, over one part of the inner dimension. A program
    takes several of these in turn if there are more than programs. Of the programs that share a
    tile, the last one adds up their sums. The programs that read them are far more."""
    let_next_begin(DEPENDENT)
    num_items = tl.load(num_blocks) * (NUM_TILES * NUM_SPLITS)
    if tl.program_id(0) >= num_items:
        # The next kernel waits only for this one.
        wait_for_inputs(DEPENDENT)
        return
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    per_split = tl.cdiv(tl.cdiv(k_size, BLOCK_K), NUM_SPLITS) * BLOCK_K
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = item % NUM_SPLITS
        tile = item // NUM_SPLITS % NUM_TILES
        first, count, slot = block_at(blocks, item // (NUM_SPLITS * NUM_TILES))
        row_table = table + tl.maximum(slot, 0) * (2 + 3 * NUM_PARTS)
        total = tl.where(slot >= 0, tl.load(row_table + 1).to(tl.int32), 0)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        a = pool + tl.multiple_of(tl.load(row_table), 8)
        row = first + r
        begin = split * per_split
        last = tl.minimum(k_size, begin + per_split)
        # Rows of the base model, and tiles beyond this adapter's ranks, multiply nothing.
        last = tl.where(tile * BLOCK_N < total, last, begin)
        x_at = x + row[:, None].to(tl.int64) * k_size + k[None, :]
        a_at = a + n[:, None].to(tl.int64) * k_size + k[None, :]
        scale = scale_of(scalings, table, tl.maximum(slot, 0), n, NUM_PARTS)[None, :]
        wait_for_inputs(DEPENDENT)
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for at in range(begin, last, BLOCK_K):
            row_mask, rank_mask = (r < count)[:, None], (n < total)[:, None]
            if not EVEN_K:
                inside = k[None, :] < last - at
                row_mask, rank_mask = row_mask & inside, rank_mask & inside
            xs = tl.load(x_at + at, mask=row_mask, other=0.0)
            weight = tl.load(a_at + at, mask=rank_mask, other=0.0)
            acc = tl.dot(xs, tl.trans(weight), acc, input_precision="ieee")
        acc *= scale
        ok = (r < count)[:, None] & (n < total)[None, :]
        to = row[:, None].to(tl.int64) * width + n[None, :]
        if NUM_SPLITS == 1:
            tl.store(hidden + to, acc, mask=ok)
        else:
            of_split = num_rows.to(tl.int64) * width
            tl.store(partial + split * of_split + to, acc, mask=ok)
            # Store all sums, then count: the program that counts last sees all sums.
            tl.debug_barrier()
            counter = counters + item // NUM_SPLITS
            if tl.atomic_add(counter, 1, sem="acq_rel") == NUM_SPLITS - 1:
                tl.store(counter, 0)
                found = tl.load(partial + to, mask=ok, other=0.0)
                for other in tl.static_range(1, NUM_SPLITS):
                    found += tl.load(partial + other * of_split + to, mask=ok, other=0.0)
                tl.store(hidden + to, found, mask=ok)


@dataclass(frozen=True, slots=True)
class ShrinkTiling:
    """How a shrink is cut. It depends on the number of rows alone and not on the step's adapters,
    so that traffic needs no other kernels than those that the start compiles."""

    num_splits: int
    """Parts of the inner dimension."""
    step_bytes: int
    """Inner dimension of an iteration."""
    num_stages: int
    block_rows: int = DECODE_BLOCK_ROWS
    """Most rows of a block."""


FEW = ShrinkTiling(4, LONG_STEP_BYTES, 3)
MORE = ShrinkTiling(4, SHORT_STEP_BYTES, 3, PREFILL_BLOCK_ROWS)
MANY = ShrinkTiling(1, SHORT_STEP_BYTES, 4, PREFILL_BLOCK_ROWS)


def _shrink_tiling(num_rows: int) -> ShrinkTiling:
    """Few blocks of rows fill the chip only in splits. Many fill it without."""
    if num_rows <= FEW_ROWS:
        return FEW
    return MORE if num_rows <= MORE_ROWS else MANY


def shrink(
    x: Tensor, site: LinearSite, rows: LoraRows, *, tiling: ShrinkTiling | None = None
) -> LoraTerm:
    """scaling * x A^T of each row's own adapter."""
    num_rows, k_size = x.shape
    cut = tiling or _shrink_tiling(num_rows)
    step = cut.step_bytes // x.itemsize
    block_n = min(64, max(16, triton.next_power_of_2(site.width)))
    num_tiles = triton.cdiv(site.width, block_n)
    # Splits of a tile share a counter. So many blocks of so many ranks fill the chip without.
    splits = cut.num_splits if rows.max_blocks * num_tiles <= NUM_COUNTERS else 1
    hidden = torch.empty(1, num_rows, site.width, dtype=site.pool.dtype, device=x.device)
    partial = hidden
    if splits > 1:  # The sum is as precise as its factors; partial sums must not be rounded.
        partial = hidden.new_empty(splits, num_rows, site.width, dtype=torch.float32)
    num_programs = min(SHRINK_PROGRAMS, rows.max_blocks * num_tiles * splits)
    _shrink[(num_programs,)](
        x, hidden, partial, counters(x.device), site.pool, site.table, site.scalings, rows.blocks,
        rows.num_blocks, num_rows, k_size, site.width,
        NUM_PARTS=site.num_parts, NUM_TILES=num_tiles, NUM_SPLITS=splits,
        BLOCK_R=cut.block_rows, BLOCK_N=block_n, BLOCK_K=step, EVEN_K=k_size % step == 0,
        num_warps=4, num_stages=cut.num_stages, **launch_options(x.device),
    )  # fmt: skip
    return LoraTerm(hidden, site, rows)


@triton.jit
def _rows_expanded(
    y, hidden, b, start, rank, first_ranks, first, count, begin, cols, inside, size, first_col,
    y_row, hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, RANK_BLOCK: tl.constexpr,
    MAX_RANK: tl.constexpr,
):  # fmt: skip
    """Add to the columns `cols` of `count` rows from `begin` on that use one adapter."""
    r = begin + tl.arange(0, BLOCK_R)
    rows = (first + r).to(tl.int64)
    ok = (r < count)[:, None] & (cols < size)[None, :]
    to = y + rows[:, None] * y_row + first_col + cols[None, :]
    acc = tl.load(to, mask=ok, other=0.0).to(tl.float32)
    first_hidden = shrunk(
        0, start, rank, hidden, hidden_split, hidden_row, rows, r < count, b, NUM_SPLITS,
        RANK_BLOCK,
    )  # fmt: skip
    acc = expand_tile(
        acc, first_hidden, first_ranks, b, start, rank, inside, hidden, hidden_split, hidden_row,
        rows, r < count, NUM_SPLITS, RANK_BLOCK, MAX_RANK,
    )  # fmt: skip
    tl.store(to, acc, mask=ok)


@triton.jit
def _expand(
    y, hidden, pool, table, blocks, num_blocks, y_row, hidden_split, hidden_row, first_col, size,
    PART: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    for block in range(tl.program_id(1), tl.load(num_blocks), tl.num_programs(1)):
        first, count, slot = block_at(blocks, block)
        start, rank, b = part_of(pool, table, slot, PART, NUM_PARTS)
        # The adapter may not change this part.
        last = tl.where(rank > 0, size, 0)
        for begin in range(tl.program_id(0) * BLOCK_N, last, tl.num_programs(0) * BLOCK_N):
            cols = begin + tl.arange(0, BLOCK_N)
            inside = tl.minimum(cols, size - 1)
            first_ranks = early_ranks(b, rank, inside, RANK_BLOCK, MAX_RANK, DEPENDENT)
            wait_for_inputs(DEPENDENT)
            if count == 1:
                _rows_expanded(
                    y, hidden, b, start, rank, first_ranks, first, 1, 0, cols, inside, size,
                    first_col, y_row, hidden_split, hidden_row, NUM_SPLITS, 1, RANK_BLOCK,
                    MAX_RANK,
                )  # fmt: skip
            else:
                for at in range(0, count, BLOCK_R):
                    _rows_expanded(
                        y, hidden, b, start, rank, first_ranks, first, count, at, cols, inside,
                        size, first_col, y_row, hidden_split, hidden_row, NUM_SPLITS, BLOCK_R,
                        RANK_BLOCK, MAX_RANK,
                    )  # fmt: skip
    # The next kernel waits only for this one, which may have had nothing to do.
    wait_for_inputs(DEPENDENT)


def expand(y: Tensor, term: LoraTerm) -> None:
    """Add the adapters' part to y [num_rows, sum of part sizes], in place."""
    site, rows, hidden = term.site, term.rows, term.hidden
    is_few = y.shape[0] <= FEW_ROWS and has_few_ranks(site)
    block_r, block_n = EXPAND_FEW if is_few else EXPAND_MANY
    first_col = 0
    for part, size in enumerate(site.part_sizes):
        num_columns = triton.cdiv(size, block_n)
        if num_columns > WIDE_TILES:
            num_columns = min(num_columns, max(16, WIDE_PROGRAMS // rows.num_programs))
        _expand[(num_columns, rows.num_programs)](
            y, hidden, site.pool, site.table, rows.blocks, rows.num_blocks, y.stride(0),
            hidden.stride(0), hidden.stride(1), first_col, size,
            PART=part, NUM_PARTS=site.num_parts, NUM_SPLITS=hidden.shape[0], BLOCK_R=block_r,
            BLOCK_N=block_n, **rank_constants(site), **launch_options(y.device),
        )  # fmt: skip
        first_col += size


@triton.jit
def _rows_completed(
    sums, y, hidden, b, start, rank, first_ranks, first, count, begin, cols, inside, size,
    first_col, sums_split, sums_row, y_row, hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
):  # fmt: skip
    """Columns of `count` rows from `begin` on that use one adapter."""
    r = begin + tl.arange(0, BLOCK_R)
    rows = (first + r).to(tl.int64)
    ok = (r < count)[:, None] & (cols < size)[None, :]
    at = sums + rows[:, None] * sums_row + first_col + cols[None, :]
    total = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(at + split * sums_split, mask=ok, other=0.0).to(tl.float32)
    first_hidden = shrunk(
        0, start, rank, hidden, hidden_split, hidden_row, rows, r < count, b, HIDDEN_SPLITS,
        RANK_BLOCK,
    )  # fmt: skip
    total = expand_tile(
        total, first_hidden, first_ranks, b, start, rank, inside, hidden, hidden_split, hidden_row,
        rows, r < count, HIDDEN_SPLITS, RANK_BLOCK, MAX_RANK,
    )  # fmt: skip
    tl.store(y + rows[:, None] * y_row + first_col + cols[None, :], total, mask=ok)


@triton.jit
def _block_completed(
    sums, y, hidden, pool, table, first, count, slot, cols, part, first_col, size, sums_split,
    sums_row, y_row, hidden_split, hidden_row,
    NUM_PARTS: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The columns `cols` of a block."""
    inside = tl.minimum(cols, size - 1)
    start, rank, b = part_of(pool, table, slot, part, NUM_PARTS)
    first_ranks = early_ranks(b, rank, inside, RANK_BLOCK, MAX_RANK, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    if count == 1:
        _rows_completed(
            sums, y, hidden, b, start, rank, first_ranks, first, 1, 0, cols, inside, size,
            first_col, sums_split, sums_row, y_row, hidden_split, hidden_row, NUM_SPLITS,
            HIDDEN_SPLITS, 1, RANK_BLOCK, MAX_RANK,
        )  # fmt: skip
    elif BLOCK_R > 1:
        for begin in range(0, count, BLOCK_R):
            _rows_completed(
                sums, y, hidden, b, start, rank, first_ranks, first, count, begin, cols, inside,
                size, first_col, sums_split, sums_row, y_row, hidden_split, hidden_row, NUM_SPLITS,
                HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK, MAX_RANK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_part", "first_col", "size", "later_size"])
def _complete(
    sums, y, hidden, pool, table, slots, blocks, num_blocks, first_part, first_col, size,
    later_size, sums_split, sums_row, y_row, hidden_split, hidden_row,
    NUM_PARTS: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    IS_EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One part, or two neighbours of `size` and `later_size` columns."""
    let_next_begin(DEPENDENT)
    tile = tl.program_id(0)
    num_tiles = tl.cdiv(size, BLOCK_N)
    if tile >= num_tiles:
        tile -= num_tiles
        first_part += 1
        first_col += size
        size = later_size
    if IS_EVEN:
        first_col, size = tl.multiple_of(first_col, 16), tl.multiple_of(size, 16)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if BLOCK_R == 1:
        row = tl.program_id(1)
        _block_completed(
            sums, y, hidden, pool, table, row, 1, tl.load(slots + row), cols, first_part,
            first_col, size, sums_split, sums_row, y_row, hidden_split, hidden_row, NUM_PARTS,
            NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK, MAX_RANK, DEPENDENT,
        )  # fmt: skip
    else:
        for block in range(tl.program_id(1), tl.load(num_blocks), tl.num_programs(1)):
            first, count, slot = block_at(blocks, block)
            _block_completed(
                sums, y, hidden, pool, table, first, count, slot, cols, first_part, first_col,
                size, sums_split, sums_row, y_row, hidden_split, hidden_row, NUM_PARTS,
                NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK, MAX_RANK, DEPENDENT,
            )  # fmt: skip


def complete(sums: Tensor, term: LoraTerm) -> Tensor:
    """The product [num_rows, n], in the dtype of adapters: partial sums [splits, num_rows, n] added
    up, and the adapters' part."""
    site, rows, hidden = term.site, term.rows, term.hidden
    y = torch.empty(sums.shape[1:], dtype=site.pool.dtype, device=sums.device)
    block_r, num_programs = rows.programs
    sizes = site.part_sizes
    first_col = 0
    for part in range(0, len(sizes), 2):  # a layer of latents has two: queries and latents
        size, later_size = sizes[part], sizes[part + 1] if part + 1 < len(sizes) else 0
        num_tiles = triton.cdiv(size, COMPLETED_COLUMNS) + triton.cdiv(
            later_size, COMPLETED_COLUMNS
        )
        _complete[(num_tiles, num_programs)](
            sums, y, hidden, site.pool, site.table, rows.slots, rows.blocks, rows.num_blocks, part,
            first_col, size, later_size, *sums.stride()[:2], y.stride(0), *hidden.stride()[:2],
            NUM_PARTS=site.num_parts, NUM_SPLITS=sums.shape[0], HIDDEN_SPLITS=hidden.shape[0],
            BLOCK_R=block_r, BLOCK_N=COMPLETED_COLUMNS,
            IS_EVEN=all(number % 16 == 0 for number in sizes), **rank_constants(site),
            **launch_options(y.device),
        )  # fmt: skip
        first_col += size + later_size
    return y


@triton.jit
def _add_embedding(
    y, tokens, pool, table, scalings, blocks, num_blocks, n_size, y_row,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, RANK_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    if block >= tl.load(num_blocks):
        return
    slot = tl.load(blocks + 3 * block + 2)
    if slot < 0:
        return
    rank = tl.multiple_of(tl.load(table + 3 * slot + 1).to(tl.int32), 8)
    if rank == 0:
        return
    first = tl.load(blocks + 3 * block)
    count = tl.load(blocks + 3 * block + 1)
    a = pool + tl.multiple_of(tl.load(table + 3 * slot), 8)
    b = pool + tl.multiple_of(tl.load(table + 3 * slot + 2), 8)
    scale = tl.load(scalings + slot)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(n, n_size - 1)
    for at in range(0, count, BLOCK_R):
        r = at + tl.arange(0, BLOCK_R)
        rows = (first + r).to(tl.int64)
        row_ok = r < count
        token = tl.load(tokens + rows, mask=row_ok, other=0)
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for begin in range(0, rank, RANK_BLOCK):
            k = begin + tl.arange(0, RANK_BLOCK)
            ok = row_ok[:, None] & (k < rank)[None, :]
            h = tl.load(a + token[:, None] * rank + k[None, :], mask=ok, other=0.0)
            weight = ranks_of(b, rank, begin, inside, RANK_BLOCK)
            acc = tl.dot(h, tl.trans(weight), acc, input_precision="ieee")
        ok = row_ok[:, None] & (n < n_size)[None, :]
        to = y + rows[:, None] * y_row + n[None, :]
        tl.store(to, tl.load(to, mask=ok, other=0.0).to(tl.float32) + scale * acc, mask=ok)


def add_embedding(y: Tensor, tokens: Tensor, site: EmbeddingSite, rows: LoraRows) -> None:
    """Add scaling * B A[token] of each row's own adapter to its vector y [num_rows, hidden].

    Runs before a step's first `rms_norm`: its output is a constant for all later kernels.
    """
    n_size = y.shape[1]
    _add_embedding[(rows.max_blocks, triton.cdiv(n_size, LOOKUP_COLUMNS))](
        y, tokens, site.pool, site.table, site.scalings, rows.blocks, rows.num_blocks, n_size,
        y.stride(0), BLOCK_R=16, BLOCK_N=LOOKUP_COLUMNS, RANK_BLOCK=LEAST_RANKS,
        **launch_options(y.device, plainly=True),
    )  # fmt: skip
