"""The gated activation, naive, in float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.lora_sites.reference import expanded
from manyroots.kernels.lora_sites.sites import LoraTerm


def silu_mul(gate_up: Tensor, dtype_like: Tensor, lora: LoraTerm | None = None) -> Tensor:
    """silu(gate) * up of [rows, 2 n] (or partial sums [splits, rows, 2 n]), in the dtype of
    `dtype_like`. `lora` is of a site with the parts gate and up."""
    total = gate_up.float() if gate_up.dim() == 2 else gate_up.float().sum(0)
    if lora is not None:
        total = total + expanded(lora)
    gate, up = total.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(dtype_like.dtype)
