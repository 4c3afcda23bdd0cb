"""Reference of the gated activation, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.activation.kinds import CLAMP_ALPHA, CLAMP_LIMIT, CLIP_LIMIT, Activation
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows, in_fp8
from manyroots.kernels.lora_ops.reference import expanded
from manyroots.kernels.lora_ops.sites import LoraTerm


def gated(
    gate_up: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    lora: LoraTerm | None = None,
    gate_factor: float = 1.0,
    form: Fp8Form | None = None,
) -> Tensor | Fp8Rows:
    """Compute activation(gate, up) of [rows, 2 n] (or partial sums [splits, rows, 2 n]), gates
    first, in `dtype` and in the `form` that the next product reads. `lora` belongs to a site with
    the parts gate and up. Gates are multiplied with `gate_factor` first."""
    total = gate_up.float() if gate_up.dim() == 2 else gate_up.float().sum(0)
    if lora is not None:
        total = total + expanded(lora)
    gate, up = total.chunk(2, dim=-1)
    found = activate(gate * gate_factor, up, activation).to(dtype)
    return found if form is None else in_fp8(found, form)


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Takes float32 tensors of one shape."""
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return (up + 1) * gate * torch.sigmoid(CLAMP_ALPHA * gate)
    if activation is Activation.CLIPPED_SILU:
        return F.silu(gate.clamp(max=CLIP_LIMIT)) * up.clamp(-CLIP_LIMIT, CLIP_LIMIT)
    if activation is Activation.SILU:
        return F.silu(gate) * up
    if activation is Activation.RELU:
        return F.relu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation is Activation.GELU_TANH else "none") * up
