"""The matrix of one product, and the form that its format makes of it once it is filled."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.kernels.operations import Operand
from manyroots.kernels.scaled import Matrix, plain
from manyroots.layers.weights.fill import FilledRows, Fills
from manyroots.layers.weights.formats import WeightFormat
from manyroots.lora.targets import Side


class Weight:
    """[out, in], as stored in checkpoints."""

    def __init__(
        self,
        data: Matrix,
        dtype: torch.dtype,
        format: WeightFormat,
        *,
        keeps_numbers: bool = False,
    ) -> None:
        """`dtype` is the dtype of the computation; for plain numbers their own. `keeps_numbers`:
        for a layer that multiplies parts of it; a copy if it is quantized."""
        self.data, self.dtype, self.format = data, dtype, format
        self.operand: Operand = data
        """The factor in products."""
        self.numbers: Tensor | None = None
        """The weight as plain numbers, if they are kept."""
        self._keeps_numbers = keeps_numbers

    def pack(self) -> None:
        """Call whenever it was filled."""
        self.operand = self.format.operand(self.data)
        if self._keeps_numbers:
            self.numbers = plain(self.data, self.dtype)

    def fills(self, name: str, rows: slice, side: Side | None, shard: Shard) -> Fills:
        """Fills of the projection that has these rows of the output."""
        return self.format.fills(self.data, FilledRows(name, rows, side, shard, self.dtype))
