"""What lies between the two products of a gated block: activation(gate) * up, and its kinds."""

from __future__ import annotations

import enum

CLAMP_LIMIT = 7.0
"""Of CLAMPED_SWIGLU: the most that a gate, and the most that an up is, either way."""
CLAMP_ALPHA = 1.702
"""Of CLAMPED_SWIGLU: how steep its sigmoid is."""


class Activation(enum.Enum):
    """Each is a function of gate and up; all but the last are activation(gate) * up."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: with gates cut off above CLAMP_LIMIT and ups on both sides,
    (up + 1) * gate * sigmoid(CLAMP_ALPHA * gate)."""
