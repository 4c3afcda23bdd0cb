"""The same on a CPU, which has no FP8 matrix instructions. A step on a CPU does not round its rows
(`gemm/torch_ops.py`); this module exists to study the rounding."""

from __future__ import annotations

from manyroots.kernels.scaled import ScaledMatrix
from manyroots.kernels.scaled_gemm.reference import is_for, linear

__all__ = ["form_for", "is_for", "linear"]


def form_for(weight: ScaledMatrix, keeps_values: bool) -> None:
    """The form in which `linear` reads rows: unrounded, since no kernel here writes others."""
