"""RMS norms beside a gate, with torch's operators: the path of a CPU. As `reference.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """Over the last dimension of x [tokens, groups, n]: rms_norm(x) * weight * silu(gate), or with
    `gate_first` rms_norm(x * silu(gate)) * weight. `weight` [n] or [groups, n]. In x's dtype."""
    values, opened = x.float(), F.silu(gate.float())
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
