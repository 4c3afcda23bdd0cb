"""The weights of all experts of one layer, in the form that kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.mxfp4 import Mxfp4Matrix
from manyroots.kernels.scaled import SIDE_STEP, TILE_COLUMNS, ScaledMatrix, plain

ExpertMatrix = Tensor | ScaledMatrix | Mxfp4Matrix
"""The weights of the experts' products."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """down(activation(gate, up)) of each expert. Sizes are any multiple of 8."""

    gate_up: ExpertMatrix
    """[num_experts, 2 n, hidden]: all gates, then all ups, for any order in the checkpoint."""
    down: ExpertMatrix
    """[num_experts, hidden, n]"""
    gate_up_bias: Tensor | None = None
    """[num_experts, 2 n]; adapters add to the same sum, before the activation."""
    down_bias: Tensor | None = None
    """[num_experts, hidden]: added to an expert's output, so it is multiplied with the pair's
    weight."""
    activation: Activation = Activation.SILU

    @property
    def has_fp8_tiles(self) -> bool:
        """Whether tiles of many tokens multiply FP8 with FP8; rows are then rounded, too."""
        return _has_tiles(self.gate_up) and _has_tiles(self.down)

    @property
    def is_fp4(self) -> bool:
        """Whether both products are in MXFP4."""
        return isinstance(self.gate_up, Mxfp4Matrix) and isinstance(self.down, Mxfp4Matrix)

    def plain(self, dtype: torch.dtype) -> ExpertWeights:
        """Experts with unquantized matrices."""
        return replace(self, gate_up=plain(self.gate_up, dtype), down=plain(self.down, dtype))

    def up_bias_or(self, other: Tensor) -> Tensor:
        """The first bias; without one, a tensor that the kernel receives and does not read."""
        return other if self.gate_up_bias is None else self.gate_up_bias

    def down_bias_or(self, other: Tensor) -> Tensor:
        """The same for the second."""
        return other if self.down_bias is None else self.down_bias


def _has_tiles(matrix: ExpertMatrix) -> bool:
    if isinstance(matrix, Tensor | Mxfp4Matrix):
        return False
    has_one = matrix.has_row_scales or matrix.group % TILE_COLUMNS == 0
    return has_one and matrix.shape[-1] % SIDE_STEP == 0
