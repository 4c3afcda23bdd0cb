"""The activation between the two products of a gated block, activation(gate) * up, and its
kinds."""

from __future__ import annotations

import enum

CLAMP_LIMIT = 7.0
"""CLAMPED_SWIGLU only: the limit of a gate (from above) and of an up (on both sides)."""
CLAMP_ALPHA = 1.702
"""CLAMPED_SWIGLU only: the factor inside its sigmoid."""

CLIP_LIMIT = 10.0
"""CLIPPED_SILU only: the limit of a gate (from above) and of an up (on both sides)."""


class Activation(enum.Enum):
    """Each kind is a function of gate and up; all but the last two are activation(gate) * up."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: clamps gates from above and ups on both sides to CLAMP_LIMIT, then computes (up + 1)
    * gate * sigmoid(CLAMP_ALPHA * gate)."""
    CLIPPED_SILU = "clipped_silu"
    """DeepSeek V4: clamps gates from above and ups on both sides to CLIP_LIMIT, then computes
    silu(gate) * up."""
