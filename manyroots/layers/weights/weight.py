"""The matrix of one product, and what its format makes of it once it is filled."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.kernels.operations import Operand
from manyroots.kernels.scaled import Matrix, plain
from manyroots.layers.weights.fill import Fills
from manyroots.layers.weights.formats import WeightFormat
from manyroots.lora.targets import Side


class Weight:
    """[out, in], as checkpoints store it."""

    def __init__(self, data: Matrix, dtype: torch.dtype, format: WeightFormat) -> None:
        """`dtype` is what is computed in; of plain numbers their own."""
        self.data, self.dtype, self.format = data, dtype, format
        self.operand: Operand = data
        """What products are computed with."""
        self.numbers: Tensor | None = None
        """It as plain numbers, where `keep_numbers` asked for them."""
        self._keeps_numbers = False

    def keep_numbers(self) -> None:
        """For a layer that multiplies with parts of it by itself: a copy where it is quantized."""
        self._keeps_numbers = True

    def pack(self) -> None:
        """Whenever it was filled."""
        self.operand = self.format.operand(self.data)
        if self._keeps_numbers:
            self.numbers = plain(self.data, self.dtype)

    def fills(self, name: str, rows: slice, side: Side | None, shard: Shard) -> Fills:
        """For the projection that has these rows of the output."""
        yield from self.format.fills(name, self.data, rows, side, shard, self.dtype)
