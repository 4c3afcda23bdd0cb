"""What tests make single layers with: a CPU, one rank, no quantization."""

from __future__ import annotations

import torch

from manyroots.kernels.choice import Kernels, kernels_for
from manyroots.layers.context import LayerContext

CPU = torch.device("cpu")


def cpu_context(
    hidden_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    eps: float = 1e-6,
    kernels: Kernels | None = None,
) -> LayerContext:
    return LayerContext(
        hidden_size=hidden_size,
        eps=eps,
        dtype=dtype,
        device=CPU,
        kernels=kernels or kernels_for(CPU),
    )
