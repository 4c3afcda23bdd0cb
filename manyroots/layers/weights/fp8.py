"""Weights of products in FP8: how they are kept, and how they are filled.

Stored ones come with their scales; others are rounded when they are loaded, each row by its largest
number. Which of the two, `formats.py` is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.errors import ConfigError
from manyroots.kernels.scaled import Matrix, ScaledMatrix, quantize_rows
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.layers.weights.formats import fp8_format
from manyroots.lora.targets import Side


def empty_matrix(
    *shape: int, dtype: torch.dtype, device: torch.device, may_be_quantized: bool = True
) -> Matrix:
    """A matrix or a stack of them, in the kind that weights have here and now."""
    kept = fp8_format()
    if kept is None or not may_be_quantized:
        return torch.empty(shape, dtype=dtype, device=device)
    *stack, rows, columns = shape
    group = columns if kept.block is None else kept.block[1]
    scales = (*stack, rows, -(-columns // group))
    return ScaledMatrix(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
        group,
    )


def matrix_fills(
    name: str, matrix: Matrix, rows: slice, side: Side | None, shard: Shard, dtype: torch.dtype
) -> Fills:
    """Where a checkpoint's tensors for these rows of a matrix go."""
    cut = {Side.OUTPUT: 0, Side.INPUT: 1, None: None}[side]
    if isinstance(matrix, Tensor):
        yield f"{name}.weight", Fill(matrix[rows], cut, shard)
        return
    data, scales = matrix.data[rows], matrix.scales[rows]
    kept = fp8_format()
    if kept is None or not kept.is_stored:
        yield f"{name}.weight", RoundingFill(data, cut, shard, scales=scales, dtype=dtype)
        return
    yield f"{name}.weight", Fill(data, cut, shard)
    if cut == 1 and matrix.has_row_scales:
        cut = None
    elif cut == 1 and not shard.is_whole and data.shape[1] % matrix.group:
        raise ConfigError(
            f"--tensor-parallel-size is {shard.size}, and a rank's {data.shape[1]} columns of "
            f"{name} are no multiple of the {matrix.group} that share a scale; choose a smaller "
            "one."
        )
    yield f"{name}.weight_scale", Fill(scales, cut, shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingFill(Fill):
    """Rounds what it is given to FP8."""

    scales: Tensor
    dtype: torch.dtype
    """What the checkpoint's numbers count as, before they are rounded."""

    @property
    def values(self) -> Tensor:
        return (self.place.float() * self.scales).to(self.dtype)

    @property
    def source_dtype(self) -> torch.dtype:
        return self.dtype

    @torch.no_grad()
    def take(self, part: Tensor) -> None:
        data, scales = quantize_rows(part.to(self.place.device, self.dtype))
        self.place.copy_(data)
        self.scales.copy_(scales)
