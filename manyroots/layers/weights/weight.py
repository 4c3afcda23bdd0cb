"""The matrix of a product: in what form it is kept, how it is filled, and how it is multiplied.

Numbers in the model's dtype, or in FP8 with scales (`fp8.py`). Products of few rows are computed by
`kernels/gemm` from `operand`, those of many by `times`; nothing else looks inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.kernels.blocks import BlockMatrix, pack_blocks
from manyroots.kernels.fp8_rows import Fp8Rows, values_of
from manyroots.kernels.packed import PackedMatrix, can_pack, pack
from manyroots.kernels.scaled import Matrix, plain
from manyroots.layers.weights.fill import Fills
from manyroots.layers.weights.fp8 import empty_matrix, matrix_fills
from manyroots.lora.targets import Side

_packs: ContextVar[bool] = ContextVar("packs", default=False)


@contextmanager
def weights_packed(is_on: bool) -> Iterator[None]:
    """Of weights that are made inside: whether they will be packed once they are filled."""
    token = _packs.set(is_on)
    try:
        yield
    finally:
        _packs.reset(token)


class Weight:
    """[out, in], as checkpoints store it."""

    data: Matrix
    _packed: PackedMatrix | BlockMatrix | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        may_be_quantized: bool = True,
    ) -> None:
        self.dtype = dtype
        """What is computed in; of plain numbers their own."""
        self.data = empty_matrix(
            out_features, in_features, dtype=dtype, device=device, may_be_quantized=may_be_quantized
        )
        # A CPU's float32 weights lie in memory the other way around where they are not packed:
        # products of 4 to 128 rows, which decoding is made of, take a half to four fifths of the
        # time so (measured).
        is_plain = isinstance(self.data, Tensor)
        if is_plain and device.type == "cpu" and dtype is torch.float32 and not _packs.get():
            self.data = torch.empty(in_features, out_features, dtype=dtype, device=device).t()

    @classmethod
    def tied_to(cls, data: Tensor) -> Weight:
        """Rows that another keeps."""
        weight = cls.__new__(cls)
        weight.data, weight.dtype = data, data.dtype
        return weight

    @property
    def operand(self) -> Matrix | PackedMatrix | BlockMatrix:
        """What products are computed with."""
        return self.data if self._packed is None else self._packed

    def pack(self, *, as_blocks: bool = False) -> None:
        """In the order of the CPU's library, too; again whenever it was filled. `as_blocks`: as
        4-bit numbers, where it consists of such."""
        if not isinstance(self.data, Tensor):
            return
        blocks = pack_blocks(self.data) if as_blocks else None
        if blocks is not None:
            self._packed = blocks
        elif can_pack(self.data.device, self.data.dtype):
            self._packed = pack(self.data)

    def times(self, x: Tensor | Fp8Rows, bias: Tensor | None, scaled_gemm: ModuleType) -> Tensor:
        """x W^T + b of many rows: by the library, or where the weight is in FP8 by `scaled_gemm`,
        which rounds the rows, too."""
        data = self.data
        if isinstance(data, Tensor) or not scaled_gemm.is_for(data, x.dtype):
            return F.linear(values_of(x), plain(data, x.dtype), bias)
        product: Tensor = scaled_gemm.linear(x, data, bias)
        return product

    def fills(self, name: str, rows: slice, side: Side | None, shard: Shard) -> Fills:
        """For the projection that has these rows of the output."""
        yield from matrix_fills(name, self.data, rows, side, shard, self.dtype)
