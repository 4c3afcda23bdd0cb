"""How weights of products are kept: one object per format, handed to layers by `LayerContext`.

A format says what a matrix takes, how a checkpoint fills it, which part of it a rank has, and how
many rows are multiplied with it; products of few rows are computed by `kernels/gemm` from the
matrix itself. `WeightFormat` keeps numbers in the model's dtype; every other format is a subclass
in a file of its own that says what differs. Embeddings, heads, routers, norms and adapters stay in
the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.kernels.blocks import pack_blocks
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows, values_of
from manyroots.kernels.fused_moe.weights import ExpertMatrix
from manyroots.kernels.operations import Operand
from manyroots.kernels.packed import can_pack, pack
from manyroots.kernels.scaled import Matrix, plain
from manyroots.layers.weights.fill import Fill, Fills, cut_of
from manyroots.lora.targets import Side

NamedTensors = Iterable[tuple[str, Tensor]]
"""Of a checkpoint, by the names that layers give their fills."""


@dataclass(frozen=True)
class WeightFormat:
    """Numbers in the model's dtype, and what every format is asked."""

    name: ClassVar[str] = "unquantized"
    """In messages."""
    reads_as_numbers: ClassVar[bool] = True
    """Whether `read` gives numbers where the fills are for such."""

    is_stored: bool = False
    """Whether the checkpoint has weights so; else they are made of its numbers as they are
    loaded."""

    # What a checkpoint is

    @classmethod
    def stored_in(cls, said: Mapping[str, Any], model_type: str) -> Self | None:
        """The format of a checkpoint whose config says this of its quantization; None where that
        is another one. Raises where it is this one in a kind that is not served."""
        return None

    @classmethod
    def rounding(cls, model_type: str) -> WeightFormat:
        """The format of numbers that are rounded as they are loaded; refuses models that can't be
        kept in it."""
        return cls()

    def read(
        self, weights: NamedTensors, fills: Mapping[str, Fill]
    ) -> Iterator[tuple[str, Tensor]]:
        """A checkpoint of this format in the spelling of the fills."""
        yield from weights

    # What is kept of it

    def on(self, device: torch.device, *, is_asked: bool) -> WeightFormat:
        """What a device keeps of it; `is_asked`: where the user named this format."""
        return self

    def made_up(self) -> WeightFormat:
        """The same without a checkpoint: numbers are rounded as they are made."""
        return self

    def check(self, device: torch.device) -> None:
        """Refuse a device that can't compute with it."""

    @property
    def unquantized(self) -> WeightFormat:
        """What products have in such a model whose few numbers decide much."""
        return self

    def num_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        """What so many numbers of products take."""
        return num_weights * dtype.itemsize

    def expert_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """What one matrix of an expert takes."""
        return self.num_bytes(rows * columns, dtype)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        """A product's, to be filled."""
        if device.type == "cpu" and dtype is torch.float32:
            # The other way around: products of 4 to 128 rows, which decoding is made of, take a
            # half to four fifths of the time so (measured).
            return torch.empty(columns, rows, dtype=dtype, device=device).t()
        return torch.empty(rows, columns, dtype=dtype, device=device)

    def experts(self, *shape: int, dtype: torch.dtype, device: torch.device) -> ExpertMatrix:
        """A stack of experts' matrices, to be filled."""
        return torch.empty(shape, dtype=dtype, device=device)

    def fills(
        self,
        name: str,
        matrix: Matrix | ExpertMatrix,
        rows: slice,
        side: Side | None,
        shard: Shard,
        dtype: torch.dtype,
    ) -> Fills:
        """Where a checkpoint's tensors for these rows of a matrix go."""
        assert isinstance(matrix, Tensor)
        yield f"{name}.weight", Fill(matrix[rows], cut_of(side), shard)

    def operand(self, matrix: Matrix) -> Operand:
        """A matrix as products take it, once it is filled."""
        return matrix

    # How it multiplies

    def row_form(
        self,
        matrix: Operand,
        num_rows: int,
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        keeps_values: bool,
    ) -> Fp8Form | None:
        """What a product wants so many rows in; None: as they are. `keeps_values`: whether adapters
        read them, too."""
        return None

    def times(
        self, x: Tensor | Fp8Rows, matrix: Matrix, bias: Tensor | None, kernels: Kernels
    ) -> Tensor:
        """x W^T + b of more rows than `kernels/gemm` takes."""
        return F.linear(values_of(x), plain(matrix, x.dtype), bias)


PLAIN = WeightFormat()


@dataclass(frozen=True)
class PackedFormat(WeightFormat):
    """The same numbers, in the order of a CPU's library, too."""

    as_blocks: bool = False
    """Whether a GGUF file's 4-bit blocks are multiplied as they are."""

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        return torch.empty(rows, columns, dtype=dtype, device=device)

    def operand(self, matrix: Matrix) -> Operand:
        assert isinstance(matrix, Tensor)
        blocks = pack_blocks(matrix) if self.as_blocks else None
        if blocks is not None:
            return blocks
        return pack(matrix) if can_pack(matrix.device, matrix.dtype) else matrix
