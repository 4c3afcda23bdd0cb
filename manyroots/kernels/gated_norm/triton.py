"""RMS norms with a gate, in Triton. Same signatures as `reference.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import (
    as_splits,
    launch_options,
    let_next_begin,
    wait_for_inputs,
)

BLOCK = 1024
FEW_TOKENS = 64


@triton.jit
def _gated_norm(
    x, gate, weight, out, eps, groups, n, x_token, x_group, gate_token, gate_group, gate_each,
    weight_group,
    EACH: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    ok = (group < groups) & (cols < n)
    scale = tl.load(weight + group * weight_group + cols, mask=ok, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    value = tl.load(x + token * x_token + group * x_group + cols, mask=ok, other=0.0)
    value = value.to(tl.float32)
    at = gate + token * gate_token + group // EACH * gate_group + group % EACH * gate_each
    z = tl.load(at + cols, mask=ok, other=0.0).to(tl.float32)
    opened = z * tl.sigmoid(z)
    if GATE_FIRST:
        value *= opened
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / n + eps)[:, None] * scale
    if not GATE_FIRST:
        value *= opened
    tl.store(out + (token * groups + group) * n + cols, value, mask=ok)


@triton.jit
def _gated(
    x, gate, out, n, x_row, gate_row, gate_step,
    SILU: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < n
    wait_for_inputs(DEPENDENT)
    value = tl.load(x + row * x_row + cols, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_row + cols * gate_step, mask=ok, other=0.0).to(tl.float32)
    value *= tl.sigmoid(z)
    if SILU:
        value *= z
    tl.store(out + row * n + cols, value, mask=ok)


@triton.jit
def _add_gated(
    sums, shared, x, weight, out, n, hidden, sums_split, sums_row, shared_split, x_row,
    NUM_SUMS: tl.constexpr, NUM_SHARED: tl.constexpr, PADDED_HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < n
    h = tl.arange(0, PADDED_HIDDEN)
    w = tl.load(weight + h, mask=h < hidden, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    value = tl.load(x + row * x_row + h, mask=h < hidden, other=0.0).to(tl.float32)
    gate = tl.sigmoid(tl.sum(value * w))
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(NUM_SHARED):
        at = shared + split * shared_split + row * n
        total += tl.load(at + cols, mask=ok, other=0.0).to(tl.float32)
    total *= gate
    for split in tl.static_range(NUM_SUMS):
        at = sums + split * sums_split + row * sums_row
        total += tl.load(at + cols, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * n + cols, total, mask=ok)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """Normalise the last dimension of x [tokens, groups, n]: rms_norm(x) * weight * silu(gate), or
    with `gate_first` rms_norm(x * silu(gate)) * weight. `weight` is [n] or [groups, n]. A gate's
    groups may be in two dimensions. The result has x's dtype."""
    num_tokens, groups, n = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(n)
    if gate.dim() == 3:
        gate = gate.unsqueeze(2)
    # With many tokens each program takes several short rows.
    block_g = 1 if num_tokens <= FEW_TOKENS else max(1, BLOCK // block)
    _gated_norm[(num_tokens, triton.cdiv(groups, block_g))](
        x, gate, weight, out, eps, groups, n, x.stride(0), x.stride(1), gate.stride(0),
        gate.stride(1), gate.stride(2), weight.stride(0) if weight.dim() == 2 else 0,
        EACH=gate.shape[2], GATE_FIRST=gate_first, BLOCK_G=block_g, BLOCK=block,
        num_warps=max(1, min(16, block_g * block // 256)), **launch_options(x.device),
    )  # fmt: skip
    return out


def add_gated(sums: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Add two terms, each [tokens, n] or partial sums of it: `sums`, and `shared` times the sigmoid
    of x [tokens, hidden] times weight [hidden]. Returns float32 [tokens, n]."""
    sums, parts = as_splits(sums), as_splits(shared)
    num_splits, num_tokens, n = sums.shape
    out = torch.empty(num_tokens, n, dtype=torch.float32, device=sums.device)
    hidden = weight.shape[0]
    _add_gated[(num_tokens, triton.cdiv(n, BLOCK))](
        sums, parts, x, weight, out, n, hidden, sums.stride(0), sums.stride(1), parts.stride(0),
        x.stride(0), NUM_SUMS=num_splits, NUM_SHARED=parts.shape[0],
        PADDED_HIDDEN=triton.next_power_of_2(hidden), BLOCK=BLOCK, **launch_options(sums.device),
    )  # fmt: skip
    return out


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate), of one shape, in x's dtype."""
    return _rows(x, gate, silu=True)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in x's dtype; shapes are broadcast."""
    return _rows(x, gate, silu=False)


def _rows(x: Tensor, gate: Tensor, *, silu: bool) -> Tensor:
    if x.dim() == 3:  # heads of a gate need not be adjacent
        return _rows(x.flatten(1), gate.flatten(1), silu=silu).view(x.shape)
    num_rows, n = x.shape
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    _gated[(num_rows, triton.cdiv(n, BLOCK))](
        x, gate, out, n, x.stride(0), gate.stride(0), 0 if gate.shape[1] == 1 else gate.stride(1),
        SILU=silu, BLOCK=BLOCK, **launch_options(x.device),
    )  # fmt: skip
    return out
