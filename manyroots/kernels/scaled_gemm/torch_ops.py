"""The same on a CPU, which has no matrix instructions of FP8: a step there does not round its rows
(`gemm/torch_ops.py`), and this is for those who ask what the rounding does."""

from __future__ import annotations

from manyroots.kernels.scaled import ScaledMatrix
from manyroots.kernels.scaled_gemm.reference import is_for, linear

__all__ = ["form_for", "is_for", "linear"]


def form_for(weight: ScaledMatrix, keeps_values: bool) -> None:
    """What `linear` wants rows in: as they are, since no kernel here writes others."""
