"""The gated activation with torch's operators; used on every CPU.

Same signatures as `reference.py`. Computes in the dtype of the product, which already includes the
adapters' part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.activation.kinds import CLAMP_ALPHA, CLAMP_LIMIT, CLIP_LIMIT, Activation
from manyroots.kernels.fp8_rows import Fp8Form
from manyroots.kernels.lora_ops.sites import LoraTerm


def gated(
    gate_up: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    lora: LoraTerm | None = None,
    gate_factor: float = 1.0,
    form: Fp8Form | None = None,
) -> Tensor:
    """Compute activation(gate, up) of [rows, 2 n], gates first, in `dtype`. Gates are multiplied
    with `gate_factor` first."""
    assert lora is None, "products of this set are finished"
    assert form is None, "products of this set read plain rows"
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_factor != 1.0:
        gate = gate * gate_factor
    return activate(gate, up, activation).to(dtype)


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Returns a new tensor; gate and up are unchanged."""
    if activation is Activation.CLAMPED_SWIGLU:
        gate = gate.clamp(max=CLAMP_LIMIT)
        gate.mul_(torch.sigmoid(gate * CLAMP_ALPHA))
        return up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1).mul_(gate)
    if activation is Activation.CLIPPED_SILU:
        return F.silu(gate.clamp(max=CLIP_LIMIT)).mul_(up.clamp(-CLIP_LIMIT, CLIP_LIMIT))
    if activation is Activation.SILU:
        return F.silu(gate).mul_(up)
    if activation is Activation.RELU:
        return F.relu(gate).mul_(up)
    kind = "tanh" if activation is Activation.GELU_TANH else "none"
    return F.gelu(gate, approximate=kind).mul_(up)
