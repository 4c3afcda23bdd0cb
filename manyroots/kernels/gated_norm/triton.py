"""RMS norms beside a gate, in Triton. Same signatures as `reference.py`; a program has one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs

BLOCK = 1024


@triton.jit
def _gated_norm(
    x, gate, weight, out, eps, n, x_token, x_group, gate_token, gate_group, weight_group,
    GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    ok = cols < n
    scale = tl.load(weight + group * weight_group + cols, mask=ok, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    value = tl.load(x + token * x_token + group * x_group + cols, mask=ok, other=0.0)
    value = value.to(tl.float32)
    z = tl.load(gate + token * gate_token + group * gate_group + cols, mask=ok, other=0.0)
    z = z.to(tl.float32)
    opened = z * tl.sigmoid(z)
    if GATE_FIRST:
        value *= opened
    value *= tl.rsqrt(tl.sum(value * value) / n + eps) * scale
    if not GATE_FIRST:
        value *= opened
    tl.store(out + (token * tl.num_programs(1) + group) * n + cols, value, mask=ok)


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


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """Over the last dimension of x [tokens, groups, n]: rms_norm(x) * weight * silu(gate), or with
    `gate_first` rms_norm(x * silu(gate)) * weight. `weight` [n] or [groups, n]. In x's dtype."""
    num_tokens, groups, n = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(n)
    _gated_norm[(num_tokens, groups)](
        x, gate, weight, out, eps, n, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1),
        weight.stride(0) if weight.dim() == 2 else 0, GATE_FIRST=gate_first, BLOCK=block,
        num_warps=max(1, min(16, block // 256)), **launch_options(x.device),
    )  # fmt: skip
    return out


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate), of one shape, in x's dtype."""
    return _rows(x, gate, silu=True)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in x's dtype; shapes are broadcast."""
    return _rows(x, gate, silu=False)


def _rows(x: Tensor, gate: Tensor, *, silu: bool) -> Tensor:
    if x.dim() == 3:  # heads of a gate need not lie side by side
        return _rows(x.flatten(1), gate.flatten(1), silu=silu).view(x.shape)
    num_rows, n = x.shape
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    _gated[(num_rows, triton.cdiv(n, BLOCK))](
        x, gate, out, n, x.stride(0), gate.stride(0), 0 if gate.shape[1] == 1 else gate.stride(1),
        SILU=silu, BLOCK=BLOCK, **launch_options(x.device),
    )  # fmt: skip
    return out
