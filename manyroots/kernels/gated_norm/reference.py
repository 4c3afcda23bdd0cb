"""RMS norms beside a gate, behind recurrent mixers; naive, in float32."""

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
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (values if gate_first else values * opened).to(x.dtype)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate), of one shape, in x's dtype."""
    return (x.float() * F.silu(gate.float())).to(x.dtype)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in x's dtype; shapes are broadcast."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)
