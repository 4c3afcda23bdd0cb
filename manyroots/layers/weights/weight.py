"""The matrix of a product: in what form it is kept, and how it is filled.

This is the plain kind, numbers in the model's dtype. Products are computed by `kernels/gemm` from
`data`; nothing else looks inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.layers.weights.fill import Fill, Side


class Weight:
    """[out, in], as checkpoints store it."""

    def __init__(
        self, in_features: int, out_features: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        # A CPU's float32 weights lie in memory the other way around: products of 4 to 128 rows,
        # which decoding is made of, take a half to four fifths of the time so (measured).
        if device.type == "cpu" and dtype is torch.float32:
            self.data = torch.empty(in_features, out_features, dtype=dtype, device=device).t()
        else:
            self.data = torch.empty(out_features, in_features, dtype=dtype, device=device)

    @classmethod
    def tied_to(cls, data: Tensor) -> Weight:
        """Rows that another keeps."""
        weight = cls.__new__(cls)
        weight.data = data
        return weight

    def fill(self, rows: slice, side: Side | None, shard: Shard) -> Fill:
        """For the projection that has these rows of the output."""
        cut = {Side.OUTPUT: 0, Side.INPUT: 1, None: None}[side]
        return Fill(self.data[rows], cut, shard)
