"""activation(gate) * up, fused with the adapters' expand.

Same signatures as `reference.py`. The operation is elementwise, so a program takes a tile of rows
that use one adapter. It reads that adapter's weights once per tile; they are most of the bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.activation.triton_kinds import activated, fast_bfloat16
from manyroots.kernels.fp8_rows import ROW_GROUP, Fp8Form, Fp8Rows, run_length, tries_scales
from manyroots.kernels.launch import as_splits, launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.lora_ops.sites import FEW_ROWS, LoraTerm
from manyroots.kernels.lora_ops.triton import (
    NO_RANKS,
    STEP_OF_RANKS,
    block_at,
    early_ranks,
    expand_tile,
    has_few_ranks,
    part_of,
    rank_constants,
    shrunk,
    single_rows_of,
)
from manyroots.kernels.triton_fp8_rows import (
    best_scale,
    empty_rows,
    in_fp8,
    scale_errors,
    scale_of,
    scaled_groups,
    store_parts,
)

BLOCK_N = 128
ROW_BLOCK_N = 256
"""Columns of a program: for several rows, and for one row with few ranks, which leaves room for
more."""
MANY_ROWS = 64
"""With more rows than this a step has enough programs, and larger programs read faster."""
ADAPTED, ADAPTED_PROMPTS = (256, 80), (128, 96)
"""Columns of a program for several rows with an adapter of few ranks, and most registers of a
thread, so that more programs run at once: in steps of more than MANY_ROWS, and of more than
FEW_ROWS."""
MOST_OF_ROW = 16_384
"""Columns of a row that one program takes if they share a scale."""
ROW_BLOCK = 4096
"""Columns that such a program holds at once; a row is seldom a power of two long."""


@triton.jit
def _inputs(
    gate_up, hidden, gate_b, gate_start, gate_rank, up_b, up_start, up_rank, first, begin, count,
    cols, n, in_split, in_row, hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the columns `cols` of BLOCK_R rows of a block from `begin` on, and what their adapter
    multiplies; zeros past the block's last row."""
    r = begin + tl.arange(0, BLOCK_R)
    rows = (first + r).to(tl.int64)
    ok = (r < count)[:, None] & (cols < n)[None, :]
    source = gate_up + rows[:, None] * in_row + cols[None, :]
    gate = tl.load(source, mask=ok, other=0.0)
    up = tl.load(source + n, mask=ok, other=0.0)
    if NUM_SPLITS > 1:
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        for split in tl.static_range(1, NUM_SPLITS):
            gate += tl.load(source + split * in_split, mask=ok, other=0.0).to(tl.float32)
            up += tl.load(source + split * in_split + n, mask=ok, other=0.0).to(tl.float32)
    gate_hidden = gate
    up_hidden = up
    if HIDDEN_SPLITS:
        gate_hidden = shrunk(
            0, gate_start, gate_rank, hidden, hidden_split, hidden_row, rows, r < count, gate_b,
            HIDDEN_SPLITS, RANK_BLOCK,
        )  # fmt: skip
        up_hidden = shrunk(
            0, up_start, up_rank, hidden, hidden_split, hidden_row, rows, r < count, up_b,
            HIDDEN_SPLITS, RANK_BLOCK,
        )  # fmt: skip
    return gate, up, gate_hidden, up_hidden


@triton.jit
def _tile_of_rows(
    inputs, out, data, scales, hidden, gate_ranks, gate_b, gate_start, gate_rank, up_ranks, up_b,
    up_start, up_rank, first, count, begin, cols, num_rows, n, gate_factor, hidden_split,
    hidden_row,
    KIND: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, HAS_OUT: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, RANK_BLOCK: tl.constexpr,
    MAX_RANK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the columns `cols` of `count` rows from `begin` on that use one adapter, of these
    `_inputs`."""
    dtype: tl.constexpr = out.dtype.element_ty
    inside = tl.minimum(cols, n - 1)
    r = begin + tl.arange(0, BLOCK_R)
    rows = (first + r).to(tl.int64)
    ok = (r < count)[:, None] & (cols < n)[None, :]
    gate, up = inputs[0].to(tl.float32), inputs[1].to(tl.float32)
    if HIDDEN_SPLITS:
        gate = expand_tile(
            gate, inputs[2], gate_ranks, gate_b, gate_start, gate_rank, inside, hidden,
            hidden_split, hidden_row, rows, r < count, HIDDEN_SPLITS, RANK_BLOCK, MAX_RANK,
        )  # fmt: skip
        up = expand_tile(
            up, inputs[3], up_ranks, up_b, up_start, up_rank, inside, hidden, hidden_split,
            hidden_row, rows, r < count, HIDDEN_SPLITS, RANK_BLOCK, MAX_RANK,
        )  # fmt: skip
    fast: tl.constexpr = DEPENDENT and dtype == tl.bfloat16
    found = activated(gate * gate_factor, up, KIND, fast).to(dtype)
    to = rows[:, None] * n + cols[None, :]
    if HAS_OUT:
        tl.store(out + to, found, mask=ok)
    if PARTS:
        groups: tl.constexpr = BLOCK_N // GROUP
        values = tl.where(ok, found.to(tl.float32), 0.0)
        scaled, scale = scaled_groups(tl.reshape(values, (BLOCK_R, groups, GROUP)), 2)
        scaled = tl.reshape(scaled, (BLOCK_R, BLOCK_N))
        store_parts(data + to, num_rows.to(tl.int64) * n, scaled, ok, PARTS)
        group = tl.program_id(0) * groups + tl.arange(0, groups)
        ok_group = (r < count)[:, None] & (group * GROUP < n)[None, :]
        tl.store(scales + group[None, :] * num_rows + rows[:, None], scale, mask=ok_group)


@triton.jit
def _single_rows(
    gate_up, out, data, scales, hidden, gate_b, gate_start, gate_rank, up_b, up_start, up_rank,
    first, count, cols, num_rows, n, gate_factor, in_split, in_row, hidden_split, hidden_row,
    KIND: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    HAS_OUT: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    SINGLE_ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the columns `cols` of a block of up to SINGLE_ROWS rows, row by row."""
    inside = tl.minimum(cols, n - 1)
    gate_ranks = early_ranks(gate_b, gate_rank, inside, RANK_BLOCK, MAX_RANK, DEPENDENT)
    up_ranks = early_ranks(up_b, up_rank, inside, RANK_BLOCK, MAX_RANK, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    inputs = ()
    for row in tl.static_range(SINGLE_ROWS):
        of_row = _inputs(
            gate_up, hidden, gate_b, gate_start, gate_rank, up_b, up_start, up_rank, first, row,
            count, cols, n, in_split, in_row, hidden_split, hidden_row, NUM_SPLITS, HIDDEN_SPLITS,
            1, RANK_BLOCK,
        )  # fmt: skip
        inputs += (of_row,)  # type: ignore[assignment]
    for row in tl.static_range(SINGLE_ROWS):
        if row < count:
            _tile_of_rows(
                inputs[row], out, data, scales, hidden, gate_ranks, gate_b, gate_start, gate_rank,
                up_ranks, up_b, up_start, up_rank, first, count, row, cols, num_rows, n,
                gate_factor, hidden_split, hidden_row, KIND, HIDDEN_SPLITS, HAS_OUT, PARTS, GROUP,
                1, BLOCK_N, RANK_BLOCK, MAX_RANK, DEPENDENT,
            )  # fmt: skip


@triton.jit
def _rows_together(
    gate_up, out, data, scales, hidden, gate_b, gate_start, gate_rank, up_b, up_start, up_rank,
    first, count, cols, num_rows, n, gate_factor, in_split, in_row, hidden_split, hidden_row,
    KIND: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    HAS_OUT: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the columns `cols` of a block, BLOCK_R rows at a time. AHEAD: load the next rows
    before these are computed."""
    inside = tl.minimum(cols, n - 1)
    gate_ranks = early_ranks(gate_b, gate_rank, inside, RANK_BLOCK, MAX_RANK, DEPENDENT)
    up_ranks = early_ranks(up_b, up_rank, inside, RANK_BLOCK, MAX_RANK, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    inputs = _inputs(
        gate_up, hidden, gate_b, gate_start, gate_rank, up_b, up_start, up_rank, first, 0, count,
        cols, n, in_split, in_row, hidden_split, hidden_row, NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R,
        RANK_BLOCK,
    )  # fmt: skip
    for begin in range(0, count, BLOCK_R):
        now = inputs
        if AHEAD:
            inputs = _inputs(
                gate_up, hidden, gate_b, gate_start, gate_rank, up_b, up_start, up_rank, first,
                begin + BLOCK_R, count, cols, n, in_split, in_row, hidden_split, hidden_row,
                NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK,
            )  # fmt: skip
        _tile_of_rows(
            now, out, data, scales, hidden, gate_ranks, gate_b, gate_start, gate_rank, up_ranks,
            up_b, up_start, up_rank, first, count, begin, cols, num_rows, n, gate_factor,
            hidden_split, hidden_row, KIND, HIDDEN_SPLITS, HAS_OUT, PARTS, GROUP, BLOCK_R, BLOCK_N,
            RANK_BLOCK, MAX_RANK, DEPENDENT,
        )  # fmt: skip
        if not AHEAD:
            inputs = _inputs(
                gate_up, hidden, gate_b, gate_start, gate_rank, up_b, up_start, up_rank, first,
                begin + BLOCK_R, count, cols, n, in_split, in_row, hidden_split, hidden_row,
                NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK,
            )  # fmt: skip


@triton.jit
def _tile_of_block(
    gate_up, out, data, scales, hidden, pool, table, first, count, slot, cols, num_rows, n,
    gate_factor, in_split, in_row, hidden_split, hidden_row,
    KIND: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    HAS_OUT: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, SINGLE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the columns `cols` of a block."""
    gate_start, gate_rank, gate_b = part_of(pool, table, slot, 0, 2)
    up_start, up_rank, up_b = part_of(pool, table, slot, 1, 2)
    if count <= SINGLE_ROWS:
        _single_rows(
            gate_up, out, data, scales, hidden, gate_b, gate_start, gate_rank, up_b, up_start,
            up_rank, first, count, cols, num_rows, n, gate_factor, in_split, in_row, hidden_split,
            hidden_row, KIND, NUM_SPLITS, HIDDEN_SPLITS, HAS_OUT, PARTS, GROUP, BLOCK_N,
            SINGLE_ROWS, STEP_OF_RANKS if MAX_RANK <= STEP_OF_RANKS else RANK_BLOCK, MAX_RANK,
            DEPENDENT,
        )  # fmt: skip
    elif BLOCK_R > 1:
        _rows_together(
            gate_up, out, data, scales, hidden, gate_b, gate_start, gate_rank, up_b, up_start,
            up_rank, first, count, cols, num_rows, n, gate_factor, in_split, in_row, hidden_split,
            hidden_row, KIND, NUM_SPLITS, HIDDEN_SPLITS, HAS_OUT, PARTS, GROUP, BLOCK_R, BLOCK_N,
            AHEAD, RANK_BLOCK, MAX_RANK, DEPENDENT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _gated(
    gate_up, out, data, scales, hidden, pool, table, slots, blocks, num_blocks, num_rows, n,
    gate_factor, in_split, in_row, hidden_split, hidden_row,
    KIND: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    HAS_OUT: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, SINGLE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    program = tl.program_id(1)
    if HIDDEN_SPLITS == 0:
        first = program * BLOCK_R
        count = tl.minimum(BLOCK_R, num_rows - first)
        wait_for_inputs(DEPENDENT)
        inputs = _inputs(
            gate_up, hidden, hidden, 0, 0, hidden, 0, 0, first, 0, count, cols, n, in_split,
            in_row, hidden_split, hidden_row, NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK,
        )  # fmt: skip
        _tile_of_rows(
            inputs, out, data, scales, hidden, 0, hidden, 0, 0, 0, hidden, 0, 0, first, count, 0,
            cols, num_rows, n, gate_factor, hidden_split, hidden_row, KIND, HIDDEN_SPLITS, HAS_OUT,
            PARTS, GROUP, BLOCK_R, BLOCK_N, RANK_BLOCK, MAX_RANK, DEPENDENT,
        )  # fmt: skip
    elif BLOCK_R == 1:
        _tile_of_block(
            gate_up, out, data, scales, hidden, pool, table, program, 1, tl.load(slots + program),
            cols, num_rows, n, gate_factor, in_split, in_row, hidden_split, hidden_row, KIND,
            NUM_SPLITS, HIDDEN_SPLITS, HAS_OUT, PARTS, GROUP, BLOCK_R, BLOCK_N, AHEAD,
            SINGLE_ROWS, RANK_BLOCK, MAX_RANK, DEPENDENT,
        )  # fmt: skip
    else:
        for block in range(program, tl.load(num_blocks), tl.num_programs(1)):
            first, count, slot = block_at(blocks, block)
            _tile_of_block(
                gate_up, out, data, scales, hidden, pool, table, first, count, slot, cols,
                num_rows, n, gate_factor, in_split, in_row, hidden_split, hidden_row, KIND,
                NUM_SPLITS, HIDDEN_SPLITS, HAS_OUT, PARTS, GROUP, BLOCK_R, BLOCK_N, AHEAD,
                SINGLE_ROWS, RANK_BLOCK, MAX_RANK, DEPENDENT,
            )  # fmt: skip


@triton.jit
def _gated_row(
    gate_up, out, data, scales, part_stride, n, gate_factor, in_split, in_row,
    KIND: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_OUT: tl.constexpr, PARTS: tl.constexpr,
    RUN: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one row whose numbers share a scale; it is PIECES blocks long."""
    dtype: tl.constexpr = out.dtype.element_ty
    fast: tl.constexpr = DEPENDENT and dtype == tl.bfloat16
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    wait_for_inputs(DEPENDENT)
    pieces = ()
    largest = tl.zeros((BLOCK,), tl.float32)
    for piece in tl.static_range(PIECES):
        at = piece * BLOCK + cols
        ok = at < n
        source = gate_up + row * in_row + at
        gate = tl.load(source, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(source + n, mask=ok, other=0.0).to(tl.float32)
        for split in tl.static_range(1, NUM_SPLITS):
            gate += tl.load(source + split * in_split, mask=ok, other=0.0).to(tl.float32)
            up += tl.load(source + split * in_split + n, mask=ok, other=0.0).to(tl.float32)
        found = activated(gate * gate_factor, up, KIND, fast)
        if HAS_OUT:
            tl.store(out + row * n + at, found.to(dtype), mask=ok)
        found = fast_bfloat16(found) if fast else found.to(dtype).to(tl.float32)
        found = tl.where(ok, found, 0.0)
        largest = tl.maximum(largest, tl.abs(found))
        pieces += (found,)  # type: ignore[assignment]
    most = tl.max(largest, axis=0)
    if RUN:
        errors = scale_errors(pieces[0], most, RUN)  # type: ignore[misc]
        for piece in tl.static_range(1, PIECES):
            errors += scale_errors(pieces[piece], most, RUN)
        scale, inverse = best_scale(most, errors)
    else:
        scale, inverse = scale_of(most)
    for piece in tl.static_range(PIECES):
        at = piece * BLOCK + cols
        store_parts(data + row * n + at, part_stride, pieces[piece] * inverse, at < n, PARTS)
    tl.store(scales + row, scale)


def gated(
    gate_up: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    lora: LoraTerm | None = None,
    gate_factor: float = 1.0,
    form: Fp8Form | None = None,
) -> Tensor | Fp8Rows:
    """Compute activation(gate, up) of [rows, 2 n] (or partial sums [splits, rows, 2 n]), gates
    first, in `dtype` and in the `form` that the next product reads. `lora` belongs to a site with
    the parts gate and up. Gates are multiplied with `gate_factor` first."""
    parts = as_splits(gate_up)
    num_rows, n = parts.shape[1], parts.shape[2] // 2
    out = torch.empty(num_rows, n, dtype=dtype, device=parts.device)
    registers: int | None = None
    single_rows = 1
    is_whole = form is not None and form.group == n <= MOST_OF_ROW
    if form is not None and is_whole and lora is None:
        return _gated_rows(parts, activation, gate_factor, out, form)
    if lora is None:
        adapters = (parts, parts, parts, parts, parts, parts)
        strides, splits, ranks = (0, 0), 0, NO_RANKS
        block_r, block_n, num_warps = 4, BLOCK_N, 4
        if num_rows > MANY_ROWS:
            block_n, num_warps = 512, 8
        elif form is not None and form.group is None:  # few, long groups
            block_r, block_n = 2, ROW_BLOCK_N
        num_programs = triton.cdiv(num_rows, block_r)
    else:
        hidden, rows = lora.hidden, lora.rows
        adapters = (
            hidden, lora.site.pool, lora.site.table, rows.slots, rows.blocks, rows.num_blocks,
        )  # fmt: skip
        strides, splits = (hidden.stride(0), hidden.stride(1)), hidden.shape[0]
        block_r, num_programs = rows.programs
        ranks = rank_constants(lora.site)
        block_n, num_warps = BLOCK_N, 4
        if has_few_ranks(lora.site):
            if block_r == 1:
                block_n = ROW_BLOCK_N
            elif num_rows > MANY_ROWS:
                block_n, registers = ADAPTED if num_rows <= FEW_ROWS else ADAPTED_PROMPTS
                single_rows = single_rows_of(lora.site, num_rows, splits)
    found = None
    if form is not None and (form.group is None or form.group == ROW_GROUP):
        group = form.group or block_n
        found = empty_rows(num_rows, n, form, group, out if form.keeps_values else None, out)
    has_out = found is None or found.values is not None
    _gated[(triton.cdiv(n, block_n), num_programs)](
        parts, out, *((out, out) if found is None else (found.data, found.scales)), *adapters,
        num_rows, n, gate_factor, parts.stride(0), parts.stride(1), *strides,
        KIND=activation.value, NUM_SPLITS=parts.shape[0], HIDDEN_SPLITS=splits, HAS_OUT=has_out,
        PARTS=0 if found is None else len(found.data),
        GROUP=ROW_GROUP if found is None else found.group, BLOCK_R=block_r, BLOCK_N=block_n,
        AHEAD=num_rows > FEW_ROWS, SINGLE_ROWS=single_rows, **ranks, num_warps=num_warps,
        num_stages=1, maxnreg=registers, **launch_options(parts.device),
    )  # fmt: skip
    if found is not None:
        return found
    return out if form is None else in_fp8(out, form)


def _gated_rows(
    parts: Tensor, activation: Activation, gate_factor: float, out: Tensor, form: Fp8Form
) -> Fp8Rows:
    """Compute `gated` for rows that have one scale each."""
    num_rows, n = out.shape
    found = empty_rows(num_rows, n, form, n, out if form.keeps_values else None, out)
    run = run_length(n)
    block = max(run, min(ROW_BLOCK, triton.next_power_of_2(n)))
    _gated_row[(num_rows,)](
        parts, out, found.data, found.scales, found.data.stride(0), n, gate_factor,
        parts.stride(0), parts.stride(1),
        KIND=activation.value, NUM_SPLITS=parts.shape[0], HAS_OUT=found.values is not None,
        PARTS=len(found.data), RUN=run if tries_scales(len(found.data), n, n) else 0,
        PIECES=triton.cdiv(n, block), BLOCK=block,
        num_warps=max(1, min(16, block // 256)), num_stages=1, **launch_options(parts.device),
    )  # fmt: skip
    return found
