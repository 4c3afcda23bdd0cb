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

    def __init__(self, data: Matrix, dtype: torch.dtype, format: WeightFormat) -> None:
        """`dtype` is the dtype of the computation; for plain numbers their own."""
        self.data, self.dtype, self.format = data, dtype, format
        self.operand: Operand = data
        """The factor in products."""
        self.numbers: Tensor | None = None
        """The weight as plain numbers, if `keep_numbers` was called."""
        self._keeps_numbers = False

    def keep_numbers(self) -> None:
        """For a layer that multiplies parts of it; a copy if it is quantized."""
        self._keeps_numbers = True

    def pack(self) -> None:
        """Call whenever it was filled."""
        self.operand = self.format.operand(self.data)
        if self._keeps_numbers:
            self.numbers = plain(self.data, self.dtype)

    def fills(self, name: str, rows: slice, side: Side | None, shard: Shard) -> Fills:
        """Fills of the projection that has these rows of the output."""
        return self.format.fills(self.data, FilledRows(name, rows, side, shard, self.dtype))
