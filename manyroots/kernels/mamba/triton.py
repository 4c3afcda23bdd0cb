"""The scan of Mamba-2 in Triton.

Same signature as `reference.py`; `torch_ops.py` gives the formulas. A program has some rows of one
head's state [head_dim, state_dim]: a decode reads and writes them once, a prompt keeps them in
registers from chunk to chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.mamba.inputs import MambaSteps
from manyroots.kernels.recurrent.rows import StateRows

CHUNK = 64
BLOCK_P = 32


@triton.jit
def _steps(dt, dt_bias, least_step, rows, row_ok, head, dt_row):
    """softplus(dt + dt_bias) of some tokens, at least `least_step`; missing tokens get 0, which
    changes nothing."""
    raw = tl.load(dt + rows * dt_row + head, mask=row_ok, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + head).to(tl.float32)
    step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    return tl.where(row_ok, tl.maximum(step, least_step), 0.0)


@triton.jit
def _decode(
    x, dt, a_log, dt_bias, b, c, d, state, out, least_step, units, is_fresh, x_row, dt_row, b_row,
    c_row, state_unit,
    HEADS: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    head, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    unit = tl.load(units + seq).to(tl.int64)
    fresh = tl.load(is_fresh + seq).to(tl.int32)
    n = tl.arange(0, STATE_DIM)
    at = state + unit * state_unit + (head * DIM + p[:, None]) * STATE_DIM + n[None, :]
    wait_for_inputs(DEPENDENT)
    matrix = tl.where(fresh != 0, 0.0, tl.load(at))
    row = seq + tl.arange(0, 1)
    step = _steps(dt, dt_bias, least_step, row, row >= 0, head, dt_row)
    decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * step)
    value = tl.load(x + seq * x_row + head * DIM + p).to(tl.float32)
    group = head // EACH
    left = tl.load(b + seq * b_row + group * STATE_DIM + n).to(tl.float32)
    right = tl.load(c + seq * c_row + group * STATE_DIM + n).to(tl.float32)
    matrix = matrix * decay[:, None] + (value * step)[:, None] * left[None, :]
    tl.store(at, matrix)
    result = tl.sum(matrix * right[None, :], axis=1)
    result += tl.load(d + head).to(tl.float32) * value
    tl.store(out + (seq * HEADS + head) * DIM + p, result)


@triton.jit
def _scan(
    x, dt, a_log, dt_bias, b, c, d, state, out, least_step, units, starts, is_fresh, x_row, dt_row,
    b_row, c_row, state_unit,
    HEADS: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    head, seq = tl.program_id(1), tl.program_id(2)
    unit = tl.load(units + seq).to(tl.int64)
    fresh = tl.load(is_fresh + seq).to(tl.int32)
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    n = tl.arange(0, STATE_DIM)
    at = state + unit * state_unit + (head * DIM + p[:, None]) * STATE_DIM + n[None, :]
    group = head // EACH
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    a = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skip = tl.load(d + head).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    matrix = tl.where(fresh != 0, 0.0, tl.load(at))
    kind = x.dtype.element_ty
    for begin in range(first, end, CHUNK):
        rows = (begin + tl.arange(0, CHUNK)).to(tl.int64)
        row_ok = rows < end
        step = _steps(dt, dt_bias, least_step, rows, row_ok, head, dt_row)
        decays = a * step
        sums = tl.cumsum(decays, axis=0)
        last = tl.sum(decays, axis=0)
        ok = row_ok[:, None]
        source = x + rows[:, None] * x_row + head * DIM + p[None, :]
        value = tl.load(source, mask=ok, other=0.0).to(tl.float32)
        inner = group * STATE_DIM + n[None, :]
        left = tl.load(b + rows[:, None] * b_row + inner, mask=ok, other=0.0)
        right = tl.load(c + rows[:, None] * c_row + inner, mask=ok, other=0.0)
        between = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], float("-inf")))
        weights = tl.dot(right, tl.trans(left), input_precision="ieee") * between
        stepped = value * step[:, None]
        result = tl.dot(weights.to(kind), stepped.to(kind), input_precision="ieee")
        since = (right.to(tl.float32) * tl.exp(sums)[:, None]).to(kind)
        result += tl.dot(since, tl.trans(matrix.to(kind)), input_precision="ieee")
        result += skip * value
        to = out + (rows[:, None] * HEADS + head) * DIM + p[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=ok)
        until = (stepped * tl.exp(last - sums)[:, None]).to(kind)
        matrix = matrix * tl.exp(last)
        matrix += tl.dot(tl.trans(until), left, input_precision="ieee")
    tl.store(at, matrix)


def scan(
    x: Tensor, b: Tensor, c: Tensor, steps: MambaSteps, state: Tensor, rows: StateRows
) -> Tensor:
    """Returns [tokens, heads, head_dim] for x of that shape, in its dtype. See `reference.py` for
    the others. Heads and groups of a token are adjacent, and dimensions are powers of two."""
    num_tokens, heads, dim = x.shape
    out = torch.empty(num_tokens, heads, dim, dtype=x.dtype, device=x.device)
    count, block_p = rows.num_decodes, min(BLOCK_P, dim)
    of_steps = (steps.dt, steps.a_log, steps.dt_bias)
    inputs = (x, *of_steps, b, c, steps.d, state, out, steps.least_step)
    strides = (x.stride(0), steps.dt.stride(0), b.stride(0), c.stride(0), state.stride(0))
    shape = {"HEADS": heads, "EACH": heads // b.shape[1], "DIM": dim, "STATE_DIM": b.shape[2]}
    shape |= {"BLOCK_P": block_p, **launch_options(x.device)}
    if count:
        _decode[(dim // block_p, heads, count)](
            *inputs, rows.units, rows.is_fresh, *strides, **shape
        )
    num_prompts = len(rows.units) - count
    if num_prompts:
        _scan[(dim // block_p, heads, num_prompts)](
            *inputs, rows.units[count:], rows.starts[count:], rows.is_fresh[count:], *strides,
            CHUNK=CHUNK, **shape,
        )  # fmt: skip
    return out
