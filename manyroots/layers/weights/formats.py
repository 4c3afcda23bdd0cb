"""Formats of products' weights: one object each, passed to layers in `LayerContext`.

A format defines the bytes of a matrix, how a checkpoint fills it, a rank's part of it, and how many
rows are multiplied with it. `kernels/gemm` computes products of few rows directly from the matrix.
`WeightFormat` stores numbers in the model's dtype. Every other format is a subclass in its own file
that defines what differs. Embeddings, heads, routers, norms and adapters stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.blocks import pack_blocks
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows, values_of
from manyroots.kernels.fused_moe.weights import ExpertMatrix
from manyroots.kernels.operations import Operand
from manyroots.kernels.packed import IS_ARM, can_pack, pack
from manyroots.kernels.scaled import Matrix, plain
from manyroots.layers.weights.fill import Fill, FilledRows, Fills

NamedTensors = Iterable[tuple[str, Tensor]]
"""Tensors of a checkpoint, by the names of layers' fills."""


@dataclass(frozen=True)
class WeightFormat:
    """Numbers in the model's dtype; also the interface of every format."""

    name: ClassVar[str] = "unquantized"
    """Used in messages."""

    is_stored: bool = False
    """Whether the checkpoint stores weights in this format; otherwise they are converted when
    loaded."""
    unquantized_names: frozenset[str] = frozenset()
    """Projections that the checkpoint leaves unquantized."""

    # What a checkpoint is

    @classmethod
    def stored_in(cls, said: Mapping[str, Any], model_type: str) -> Self | None:
        """The format of a checkpoint with this quantization config; None if it is another format.
        Raises for unsupported kinds of this format."""
        return None

    @classmethod
    def rounding(cls, model_type: str) -> WeightFormat:
        """The format of numbers that are rounded when loaded; refuses unsupported models."""
        return cls()

    def read(
        self, weights: NamedTensors, fills: Mapping[str, Fill]
    ) -> Iterator[tuple[str, Tensor]]:
        """A checkpoint of this format with the names of the fills."""
        yield from weights

    def as_stored(self, weights: NamedTensors) -> WeightFormat:
        """The format of a checkpoint with these tensors, whose numbers are not read: it may leave
        projections unquantized."""
        return self

    # What is kept of it

    def on(self, device: torch.device, *, is_asked: bool) -> WeightFormat:
        """The format on this device; `is_asked`: whether the user named this format."""
        return self

    def made_up(self) -> WeightFormat:
        """The same without a checkpoint: numbers are rounded as they are made."""
        return self

    def check(self, device: torch.device) -> None:
        """Refuse a device that cannot compute with it."""

    @property
    def unquantized(self) -> WeightFormat:
        """The format of products whose few numbers matter much."""
        return self

    def of(self, projections: Iterable[str]) -> WeightFormat:
        """The format of a product, or of experts, with these projections: unquantized if one of
        them is, because all share one matrix."""
        is_left = any(name in self.unquantized_names for name in projections)
        return self.unquantized if is_left else self

    @property
    def for_experts(self) -> WeightFormat:
        """The format of experts."""
        return self

    def num_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        """Bytes of this many numbers of products."""
        return num_weights * dtype.itemsize

    def expert_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Bytes of one matrix of an expert."""
        return self.num_bytes(rows * columns, dtype)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        """An unfilled matrix of a product."""
        if device.type == "cpu" and dtype is torch.float32:
            # Transposed: products of 4 to 128 rows, which decoding consists of, then take a half to
            # four fifths of the time (measured).
            return torch.empty(columns, rows, dtype=dtype, device=device).t()
        return torch.empty(rows, columns, dtype=dtype, device=device)

    def experts(self, *shape: int, dtype: torch.dtype, device: torch.device) -> ExpertMatrix:
        """An unfilled stack of experts' matrices."""
        return torch.empty(shape, dtype=dtype, device=device)

    def fills(self, matrix: Matrix | ExpertMatrix, own: FilledRows) -> Fills:
        """Destinations of a checkpoint's tensors for these rows of a matrix."""
        assert isinstance(matrix, Tensor)
        yield f"{own.name}.weight", Fill(matrix[own.rows], own.cut, own.shard)

    def operand(self, matrix: Matrix) -> Operand:
        """A filled matrix in the form that products read."""
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
        """The form in which a product reads this many rows; None: unchanged. `keeps_values`:
        whether adapters read them, too."""
        return None

    def times(
        self, x: Tensor | Fp8Rows, matrix: Matrix, bias: Tensor | None, kernels: Kernels
    ) -> Tensor:
        """x W^T + b for more rows than `kernels/gemm` takes."""
        return F.linear(values_of(x), plain(matrix, x.dtype), bias)


PLAIN = WeightFormat()


@dataclass(frozen=True)
class PackedFormat(WeightFormat):
    """The same numbers, also in the order of a CPU's library."""

    as_blocks: bool = False
    """Whether a GGUF file's 4-bit blocks are multiplied without conversion."""

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        if not IS_ARM:
            return super().matrix(rows, columns, dtype, device)
        return torch.empty(rows, columns, dtype=dtype, device=device)

    def operand(self, matrix: Matrix) -> Operand:
        assert isinstance(matrix, Tensor)
        blocks = pack_blocks(matrix) if self.as_blocks else None
        if blocks is not None:
            return blocks
        return pack(matrix) if can_pack(matrix.device, matrix.dtype) else matrix
