"""The gated delta rule in Triton.

Same signature as `reference.py`; `torch_ops.py` gives the formulas.

    decode   a program has some value columns of one head's state: one read, one write of it
    prompts  `_solve`: each chunk's triangular system, all chunks and heads side by side
             `_scan`: chunk after chunk through the state, which stays in registers

A system is solved row by row. Its inverse as a product of powers takes fewer steps, but its terms
grow so large for repeated keys that float32 loses the result. Products keep the precision of their
inputs' dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.delta_rule.inputs import DeltaGates
from manyroots.kernels.delta_rule.reference import EPS
from manyroots.kernels.delta_rule.triton_channels import channel_delta
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.recurrent.rows import StateRows

__all__ = ["channel_delta", "gated_delta"]

CHUNK = 32
"""Tokens that a prompt's kernels take at once. With 64, and with products of groups of warps and a
pipelined loop, prompts ended in an illegal memory access on an H200 (Triton 3.6). Not explained."""
MIN_COLUMNS = 32
"""Narrower keys or values are multiplied in float32: with keys of 16 in bfloat16 a prompt ended in
an illegal memory access on an H200 (Triton 3.6). Not explained; no public model has such."""
BLOCK_V = 32
"""Value columns of a program; it keeps a matrix [key_dim, BLOCK_V] in registers."""


@triton.jit
def _gates(
    decay, beta, a_log, dt_bias, rows, row_ok, head, gate_row, gate_group, EACH: tl.constexpr
):
    """g and beta of some tokens; missing tokens get 0 and 0, which change nothing."""
    at = rows * gate_row + (head // EACH) * gate_group + head % EACH
    raw = tl.load(decay + at, mask=row_ok, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + head).to(tl.float32)
    # softplus; above 20 it equals its input in float32.
    step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    g = -tl.exp(tl.load(a_log + head).to(tl.float32)) * step
    b = tl.sigmoid(tl.load(beta + at, mask=row_ok, other=0.0).to(tl.float32))
    return tl.where(row_ok, g, 0.0), tl.where(row_ok, b, 0.0)


@triton.jit
def _unit_rows(x, rows, row_ok, at, row_stride, EPS: tl.constexpr, DIM: tl.constexpr):
    """Rows normalised to length 1, [n, DIM] in float32."""
    d = tl.arange(0, DIM)
    source = x + rows[:, None] * row_stride + at + d[None, :]
    value = tl.load(source, mask=row_ok[:, None], other=0.0).to(tl.float32)
    return value * tl.rsqrt(tl.sum(value * value, axis=1) + EPS)[:, None]


@triton.jit
def _decode(
    q, k, v, decay, beta, a_log, dt_bias, state, out, units, is_fresh, qk_row, qk_group,
    v_row, v_group, gate_row, gate_group, state_unit,
    HEADS: tl.constexpr, EACH: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, EPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    unit = tl.load(units + seq).to(tl.int64)
    fresh = tl.load(is_fresh + seq).to(tl.int32)
    d = tl.arange(0, KEY_DIM)
    at = state + unit * state_unit + (head * KEY_DIM + d[:, None]) * VALUE_DIM + cols[None, :]
    # No other kernel of a step writes this state, so it may be read before the inputs are ready.
    matrix = tl.load(at)
    wait_for_inputs(DEPENDENT)
    matrix = tl.where(fresh != 0, 0.0, matrix)
    row = seq + tl.arange(0, 1)
    row_ok = row >= 0
    g, b = _gates(decay, beta, a_log, dt_bias, row, row_ok, head, gate_row, gate_group, EACH)
    at_key = seq * qk_row + (head // EACH) * qk_group + d
    key = tl.load(k + at_key).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key) + EPS)
    query = tl.load(q + at_key).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query) + EPS) * (KEY_DIM**-0.5)
    at_value = seq * v_row + (head // EACH) * v_group + (head % EACH) * VALUE_DIM
    value = tl.load(v + at_value + cols).to(tl.float32)
    matrix *= tl.exp(g)[:, None]
    read = tl.sum(matrix * key[:, None], axis=0)
    matrix += key[:, None] * ((value - read) * b)[None, :]
    tl.store(at, matrix)
    result = tl.sum(matrix * query[:, None], axis=0)
    tl.store(out + (seq * HEADS + head) * VALUE_DIM + cols, result)


@triton.jit
def _chunk_rows(first, end, chunk, CHUNK: tl.constexpr):
    """Indexes of the tokens of one chunk of a sequence, and a mask of those that exist."""
    rows = first + chunk * CHUNK + tl.arange(0, CHUNK)
    return rows.to(tl.int64), rows < end


@triton.jit
def _solve(
    k, v, decay, beta, a_log, dt_bias, wanted, reading, starts, qk_row, qk_group, v_row, v_group,
    gate_row, gate_group,
    HEADS: tl.constexpr, EACH: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, IS_NARROW: tl.constexpr, EPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    chunk, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    wait_for_inputs(DEPENDENT)
    if first + chunk * CHUNK >= end:
        return
    rows, row_ok = _chunk_rows(first, end, chunk, CHUNK)
    g, b = _gates(decay, beta, a_log, dt_bias, rows, row_ok, head, gate_row, gate_group, EACH)
    sums = tl.cumsum(g, axis=0)
    key = _unit_rows(k, rows, row_ok, (head // EACH) * qk_group, qk_row, EPS, KEY_DIM)
    kind = tl.float32 if IS_NARROW else k.dtype.element_ty
    operand = key.to(kind)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # The system's transpose: one of its rows is then a column here, which multiplies result rows.
    between = tl.exp(tl.where(i < j, sums[None, :] - sums[:, None], float("-inf")))
    system = tl.dot(operand, tl.trans(operand), input_precision="ieee") * between * b[None, :]
    inverse = (i == j).to(tl.float32)
    for row in range(1, CHUNK):
        factors = tl.sum(tl.where(j == row, system, 0.0), axis=1)
        found = tl.sum(factors[:, None] * inverse, axis=0)
        inverse -= tl.where(i == row, found[None, :], 0.0)
    inverse = inverse.to(kind)
    d, e = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    source = v + (head // EACH) * v_group + (head % EACH) * VALUE_DIM
    source += rows[:, None] * v_row + e[None, :]
    value = tl.load(source, mask=row_ok[:, None], other=0.0).to(tl.float32) * b[:, None]
    value = tl.dot(inverse, value.to(kind), input_precision="ieee")
    place = rows * HEADS + head
    to = wanted + place[:, None] * VALUE_DIM + e[None, :]
    tl.store(to, value.to(wanted.dtype.element_ty), mask=row_ok[:, None])
    weighted = (key * (b * tl.exp(sums))[:, None]).to(kind)
    weighted = tl.dot(inverse, weighted, input_precision="ieee")
    to = reading + place[:, None] * KEY_DIM + d[None, :]
    tl.store(to, weighted.to(reading.dtype.element_ty), mask=row_ok[:, None])


@triton.jit
def _scan(
    q, k, decay, beta, a_log, dt_bias, wanted, reading, state, out, units, starts, is_fresh,
    qk_row, qk_group, gate_row, gate_group, state_unit,
    HEADS: tl.constexpr, EACH: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, IS_NARROW: tl.constexpr, EPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head, seq = tl.program_id(1), tl.program_id(2)
    unit = tl.load(units + seq).to(tl.int64)
    fresh = tl.load(is_fresh + seq).to(tl.int32)
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    d = tl.arange(0, KEY_DIM)
    # Transposed: a chunk's addition is then a product with few rows, like the others.
    at = state + unit * state_unit + (head * KEY_DIM + d[None, :]) * VALUE_DIM + cols[:, None]
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    kind = tl.float32 if IS_NARROW else k.dtype.element_ty
    wait_for_inputs(DEPENDENT)
    matrix = tl.where(fresh != 0, 0.0, tl.load(at))
    for chunk in tl.range(0, tl.cdiv(end - first, CHUNK), num_stages=1):
        rows, row_ok = _chunk_rows(first, end, chunk, CHUNK)
        g, _ = _gates(decay, beta, a_log, dt_bias, rows, row_ok, head, gate_row, gate_group, EACH)
        sums = tl.cumsum(g, axis=0)
        last = tl.sum(g, axis=0)
        place = rows * HEADS + head
        read = tl.load(
            reading + place[:, None] * KEY_DIM + d[None, :], mask=row_ok[:, None], other=0.0
        )
        new = tl.load(
            wanted + place[:, None] * VALUE_DIM + cols[None, :], mask=row_ok[:, None], other=0.0
        ).to(tl.float32)
        operand = tl.trans(matrix.to(kind))
        new -= tl.dot(read.to(kind), operand, input_precision="ieee")
        query = _unit_rows(q, rows, row_ok, (head // EACH) * qk_group, qk_row, EPS, KEY_DIM)
        query *= KEY_DIM**-0.5
        key = _unit_rows(k, rows, row_ok, (head // EACH) * qk_group, qk_row, EPS, KEY_DIM)
        between = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], float("-inf")))
        scores = tl.dot(query.to(kind), tl.trans(key.to(kind)), input_precision="ieee") * between
        written = new.to(kind)
        result = tl.dot(scores.to(kind), written, input_precision="ieee")
        since = (query * tl.exp(sums)[:, None]).to(kind)
        result += tl.dot(since, operand, input_precision="ieee")
        to = out + place[:, None] * VALUE_DIM + cols[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=row_ok[:, None])
        until = (key * tl.exp(last - sums)[:, None]).to(kind)
        matrix = matrix * tl.exp(last)
        matrix += tl.dot(tl.trans(written), until, input_precision="ieee")
    tl.store(at, matrix)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows
) -> Tensor:
    """Values [tokens, heads, value_dim] that queries read, in the dtype of v. See `reference.py`
    for the shapes. Queries and keys have the same strides, and so have decays and betas. The heads
    of a key head are adjacent; dimensions are powers of two."""
    num_tokens, groups, each, value_dim = v.shape
    heads, key_dim = groups * each, q.shape[2]
    assert q.stride() == k.stride()
    assert gates.decay.stride() == gates.beta.stride()
    out = torch.empty(num_tokens, heads, value_dim, dtype=v.dtype, device=v.device)
    of_keys, of_values = (q.stride(0), q.stride(1)), (v.stride(0), v.stride(1))
    of_gates = (gates.decay.stride(0), gates.decay.stride(1))
    shape = {"HEADS": heads, "EACH": each, "KEY_DIM": key_dim}
    shape |= {"VALUE_DIM": value_dim, **launch_options(v.device)}
    block_v = min(BLOCK_V, value_dim)
    count = rows.num_decodes
    if count:
        _decode[(value_dim // block_v, heads, count)](
            q, k, v, *gates.all, state, out, rows.units, rows.is_fresh, *of_keys, *of_values,
            *of_gates, state.stride(0), BLOCK_V=block_v, EPS=EPS, **shape,
        )  # fmt: skip
    num_prompts = len(rows.units) - count
    if num_prompts:
        wanted = torch.empty(num_tokens, heads, value_dim, dtype=v.dtype, device=v.device)
        reading = torch.empty(num_tokens, heads, key_dim, dtype=v.dtype, device=v.device)
        starts = rows.starts[count:]
        num_chunks = triton.cdiv(rows.max_len, CHUNK)
        shape |= {"CHUNK": CHUNK, "IS_NARROW": min(key_dim, value_dim) < MIN_COLUMNS}
        _solve[(num_chunks, heads, num_prompts)](
            k, v, *gates.all, wanted, reading, starts, *of_keys, *of_values, *of_gates, EPS=EPS,
            **shape,
        )  # fmt: skip
        _scan[(value_dim // block_v, heads, num_prompts)](
            q, k, *gates.all, wanted, reading, state, out, rows.units[count:], starts,
            rows.is_fresh[count:], *of_keys, *of_gates, state.stride(0), BLOCK_V=block_v,
            EPS=EPS, **shape,
        )  # fmt: skip
    return out
