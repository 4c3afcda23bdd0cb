"""Reference of RMS norms with a gate, which follow recurrent mixers; in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """Normalise the last dimension of x [tokens, groups, n]: rms_norm(x) * weight * silu(gate), or
    with `gate_first` rms_norm(x * silu(gate)) * weight. `weight` is [n] or [groups, n]. A gate's
    groups may be in two dimensions. The result has x's dtype."""
    values, opened = x.float(), F.silu(gate.reshape(x.shape).float())
    if gate_first:
        values = values * opened
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (values if gate_first else values * opened).to(x.dtype)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate), of one shape, in x's dtype."""
    return (x.float() * F.silu(gate.float())).to(x.dtype)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in x's dtype; shapes are broadcast."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def add_gated(sums: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Add two terms, each [tokens, n] or partial sums of it: `sums`, and `shared` times the sigmoid
    of x [tokens, hidden] times weight [hidden]. Returns float32 [tokens, n]."""
    gate = torch.sigmoid(x.float() @ weight.float())
    return _added_up(sums) + gate[:, None] * _added_up(shared)


def _added_up(sums: Tensor) -> Tensor:
    return sums.float().sum(0) if sums.dim() == 3 else sums.float()
