"""RMS norms with a gate, with torch's operators; used on CPUs. Signatures as in `reference.py`."""

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
    values = F.rms_norm(values, (x.shape[-1],), None, eps).mul_(weight)
    return (values if gate_first else values.mul_(opened)).to(x.dtype)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate), of one shape, in x's dtype."""
    return F.silu(gate.float()).mul_(x).to(x.dtype)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in x's dtype; shapes are broadcast."""
    return (x * torch.sigmoid(gate.float())).to(x.dtype)


def add_gated(sums: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Add two terms, each [tokens, n] or partial sums of it: `sums`, and `shared` times the sigmoid
    of x [tokens, hidden] times weight [hidden]. Returns float32 [tokens, n]."""
    gate = torch.sigmoid(x.float() @ weight.float())
    return _added_up(sums) + gate[:, None] * _added_up(shared)


def _added_up(sums: Tensor) -> Tensor:
    return sums.float().sum(0) if sums.dim() == 3 else sums.float()
