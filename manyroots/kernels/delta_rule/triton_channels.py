"""The delta rule with a decay for each channel of a key, in Triton, token by token.

A program keeps some value columns of one head's state in registers and loops over the tokens of one
sequence. A decode step reads and writes the state once. Prompts are not computed in chunks yet, so
a long prompt takes as long as its tokens one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.delta_rule.inputs import DeltaGates
from manyroots.kernels.delta_rule.reference import EPS
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.recurrent.rows import StateRows

BLOCK_V = 32
"""Value columns of a program."""


@triton.jit
def _tokens(
    q, k, v, decay, beta, a_log, dt_bias, state, out, units, starts, is_fresh, q_row, k_row, v_row,
    decay_row, beta_row, state_unit,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    EPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    unit = tl.load(units + seq).to(tl.int64)
    fresh = tl.load(is_fresh + seq).to(tl.int32)
    d = tl.arange(0, KEY_DIM)
    at = state + unit * state_unit + (head * KEY_DIM + d[:, None]) * VALUE_DIM + cols[None, :]
    matrix = tl.where(fresh != 0, 0.0, tl.load(at))
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * KEY_DIM + d).to(tl.float32)
    begin, end = tl.load(starts + seq).to(tl.int64), tl.load(starts + seq + 1).to(tl.int64)
    for t in range(begin, end):
        raw = tl.load(decay + t * decay_row + head * KEY_DIM + d).to(tl.float32) + bias
        step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        key = tl.load(k + t * k_row + head * KEY_DIM + d).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key) + EPS)
        query = tl.load(q + t * q_row + head * KEY_DIM + d).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query) + EPS) * KEY_DIM**-0.5
        value = tl.load(v + t * v_row + head * VALUE_DIM + cols).to(tl.float32)
        strength = tl.sigmoid(tl.load(beta + t * beta_row + head).to(tl.float32))
        matrix *= tl.exp(rate * step)[:, None]
        written = strength * (value - tl.sum(matrix * key[:, None], axis=0))
        matrix += key[:, None] * written[None, :]
        read = tl.sum(matrix * query[:, None], axis=0)
        to = out + (t * HEADS + head) * VALUE_DIM + cols
        tl.store(to, read.to(out.dtype.element_ty))
    tl.store(at, matrix)


def channel_delta(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows
) -> Tensor:
    """Values [tokens, heads, value_dim] that queries read. See `reference.py` for the shapes. A
    token's heads are adjacent; dimensions are powers of two."""
    num_tokens, heads, value_dim = v.shape
    out = torch.empty(num_tokens, heads, value_dim, dtype=v.dtype, device=v.device)
    block_v = min(BLOCK_V, value_dim)
    _tokens[(value_dim // block_v, heads, len(rows.units))](
        q, k, v, *gates.all, state, out, rows.units, rows.starts, rows.is_fresh, q.stride(0),
        k.stride(0), v.stride(0), gates.decay.stride(0), gates.beta.stride(0), state.stride(0),
        HEADS=heads, KEY_DIM=q.shape[2], VALUE_DIM=value_dim, BLOCK_V=block_v, EPS=EPS,
        **launch_options(v.device),
    )  # fmt: skip
    return out
