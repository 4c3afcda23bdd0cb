"""What the scan of Mamba-2 takes beside its sequences; the same for every set of kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MambaSteps:
    """A token's step is softplus(dt + dt_bias), at least `least_step`; a is -exp(a_log)."""

    dt: Tensor
    """[tokens, heads], a raw product."""
    a_log: Tensor
    dt_bias: Tensor
    d: Tensor
    """These three: [heads]."""
    least_step: float = 0.0
