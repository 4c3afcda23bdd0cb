"""The weights of all experts of one layer, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyroots.kernels.activation.kinds import Activation


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """down(activation(gate, up)) of each expert. Sizes are any multiple of 8."""

    gate_up: Tensor
    """[num_experts, 2 n, hidden]: all gates, then all ups, whatever a checkpoint's order is."""
    down: Tensor
    """[num_experts, hidden, n]"""
    gate_up_bias: Tensor | None = None
    """[num_experts, 2 n]; adapters add to the same sum, before the activation."""
    down_bias: Tensor | None = None
    """[num_experts, hidden]: of an expert's output, so a token takes as much of it as of that."""
    activation: Activation = Activation.SILU
