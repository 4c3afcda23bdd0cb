"""A causal convolution of each channel by itself, in Triton.

Same signature as `reference.py`. A program has some channels of some tokens of one sequence. If
sequences have one token each, it also updates the state. A prompt's first tokens read the state
that its last tokens replace, so a second launch updates it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.recurrent.rows import StateRows

BLOCK_C = 128
BLOCK_T = 32


@triton.jit
def _input(
    x, state, unit, first, at, cols, ok, fresh, x_row, x_group, state_unit, state_channel,
    GROUP: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Load the inputs [tokens, channels] at positions `at` of a sequence; its own tokens start at
    0."""
    column = cols // GROUP * x_group + cols % GROUP
    own = x + (first + tl.maximum(at, 0)).to(tl.int64)[:, None] * x_row + column[None, :]
    found = tl.load(own, mask=ok & (at >= 0)[:, None], other=0.0).to(tl.float32)
    kept = state + unit * state_unit + cols[None, :] * state_channel
    kept += (tl.minimum(at, -1) + BEFORE)[:, None]
    before = tl.load(kept, mask=ok & (at < 0)[:, None], other=0.0).to(tl.float32)
    return found + tl.where(fresh != 0, 0.0, before)


@triton.jit
def _conv(
    x, weight, bias, state, out, units, starts, is_fresh, channels, x_row, x_group, state_unit,
    state_channel,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, KEEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = cols < channels
    seq = tl.program_id(2)
    unit = tl.load(units + seq).to(tl.int64)
    fresh = tl.load(is_fresh + seq).to(tl.int32)
    first = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - first
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = (t < count)[:, None] & col_ok[None, :]
    wait_for_inputs(DEPENDENT)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        w = tl.load(weight + cols * WIDTH + tap, mask=col_ok, other=0.0).to(tl.float32)
        at = t + (tap - WIDTH + 1)
        total += w[None, :] * _input(
            x, state, unit, first, at, cols, ok, fresh, x_row, x_group, state_unit, state_channel,
            GROUP, WIDTH - 1,
        )  # fmt: skip
    if SILU:
        total *= tl.sigmoid(total)
    rows = (first + t).to(tl.int64)
    tl.store(out + rows[:, None] * channels + cols[None, :], total, mask=ok)
    if KEEPS:
        _move_on(
            x, state, unit, first, count, cols, col_ok, fresh, x_row, x_group, state_unit,
            state_channel, GROUP, WIDTH - 1, PADDED_BEFORE,
        )  # fmt: skip


@triton.jit
def _move_on(
    x, state, unit, first, count, cols, col_ok, fresh, x_row, x_group, state_unit, state_channel,
    GROUP: tl.constexpr, BEFORE: tl.constexpr, PADDED_BEFORE: tl.constexpr,
):  # fmt: skip
    """Store the last inputs of a sequence as its state."""
    place = tl.arange(0, PADDED_BEFORE)
    ok = (place < BEFORE)[:, None] & col_ok[None, :]
    found = _input(
        x, state, unit, first, place + count - BEFORE, cols, ok, fresh, x_row, x_group, state_unit,
        state_channel, GROUP, BEFORE,
    )  # fmt: skip
    # Read everything before writing anything.
    tl.debug_barrier()
    to = state + unit * state_unit + cols[None, :] * state_channel + place[:, None]
    tl.store(to, found.to(state.dtype.element_ty), mask=ok)


@triton.jit
def _keep(
    x, state, units, starts, is_fresh, channels, x_row, x_group, state_unit, state_channel,
    GROUP: tl.constexpr, BEFORE: tl.constexpr, PADDED_BEFORE: tl.constexpr, BLOCK_C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    seq = tl.program_id(1)
    unit = tl.load(units + seq).to(tl.int64)
    fresh = tl.load(is_fresh + seq).to(tl.int32)
    first = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - first
    wait_for_inputs(DEPENDENT)
    _move_on(
        x, state, unit, first, count, cols, cols < channels, fresh, x_row, x_group, state_unit,
        state_channel, GROUP, BEFORE, PADDED_BEFORE,
    )  # fmt: skip


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: StateRows,
    activation: str | None,
) -> Tensor:
    """Convolve x [tokens, channels], or [tokens, groups, channels of each], with weight [channels,
    width], newest token last; gives [tokens, channels]. `state` [units, channels, width - 1] holds
    the inputs before a sequence's first token, and afterwards those before its next token.
    `activation`: None or "silu"."""
    channels, width = weight.shape
    if x.dim() == 2:
        x = x.unsqueeze(1)
    out = torch.empty(x.shape[0], channels, dtype=x.dtype, device=x.device)
    num_blocks, padded = triton.cdiv(channels, BLOCK_C), triton.next_power_of_2(width - 1)
    options = launch_options(x.device)
    strides = (channels, x.stride(0), x.stride(1), state.stride(0), state.stride(1))
    decodes, prompts = slice(0, rows.num_decodes), slice(rows.num_decodes, len(rows.units))
    for part, keeps in ((decodes, True), (prompts, False)):
        count = part.stop - part.start
        if not count:
            continue
        # Starts are offsets into all tokens, for any subset of sequences in a launch.
        where = (rows.units[part], rows.starts[part.start :], rows.is_fresh[part])
        block_t = 1 if keeps else BLOCK_T
        num_steps = 1 if keeps else triton.cdiv(rows.max_len, BLOCK_T)
        _conv[(num_blocks, num_steps, count)](
            x, weight, x if bias is None else bias, state, out, *where, *strides,
            GROUP=x.shape[2], WIDTH=width, PADDED_BEFORE=padded, HAS_BIAS=bias is not None,
            SILU=activation == "silu", KEEPS=keeps, BLOCK_T=block_t, BLOCK_C=BLOCK_C, **options,
        )  # fmt: skip
        if not keeps:
            _keep[(num_blocks, count)](
                x, state, *where, *strides, GROUP=x.shape[2], BEFORE=width - 1,
                PADDED_BEFORE=padded, BLOCK_C=BLOCK_C, **options,
            )  # fmt: skip
    return out
