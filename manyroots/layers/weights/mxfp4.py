"""Weights of experts in MXFP4: how they are kept, and how they are filled.

Stored ones are taken as they are, bit by bit, and only put in another order; others are rounded
when they are loaded. Where the format is another one, experts are kept like every product
(`fp8.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.fused_moe.weights import ExpertMatrix
from manyroots.kernels.mxfp4 import (
    BIAS,
    GROUP,
    LARGEST_EXPONENT,
    LEAST_EXPONENT,
    Mxfp4Matrix,
    quantize,
)
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.layers.weights.formats import Mxfp4Format, mxfp4_format
from manyroots.layers.weights.fp8 import empty_matrix, matrix_fills
from manyroots.lora.targets import Side

KIND = "weight_mxfp4"
"""How a checkpoint's name ends behind a projection: uint8 [rows, groups, 16 bytes of two numbers
and an exponent], so that ranks cut it like the numbers."""


def empty_experts(*shape: int, dtype: torch.dtype, device: torch.device) -> ExpertMatrix:
    """A stack of matrices, in the kind that experts' weights have here and now."""
    if mxfp4_format() is None:
        return empty_matrix(*shape, dtype=dtype, device=device)
    if shape[-1] % GROUP:
        raise ConfigError(
            f"experts with rows of {shape[-1]} numbers can't be kept in MXFP4, in which {GROUP} "
            "share an exponent; choose a smaller --tensor-parallel-size, or an unquantized "
            "checkpoint."
        )
    return Mxfp4Matrix.empty(*shape, device=device)


def expert_fills(
    name: str,
    matrix: ExpertMatrix,
    rows: slice,
    side: Side,
    shard: Shard,
    dtype: torch.dtype,
    kept: Mxfp4Format | None,
) -> Fills:
    """Where a checkpoint's tensors for these rows of an expert's matrix go. `kept` is what it was
    made as."""
    if not isinstance(matrix, Mxfp4Matrix):
        yield from matrix_fills(name, matrix, rows, side, shard, dtype)
        return
    cut, own = {Side.OUTPUT: 0, Side.INPUT: 1}[side], matrix[rows]
    if kept is not None and kept.is_stored:
        yield f"{name}.{KIND}", Mxfp4Fill(own.words, cut, shard, matrix=own, dtype=dtype)
    else:
        yield f"{name}.weight", Mxfp4RoundingFill(own.words, cut, shard, matrix=own, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4RoundingFill(Fill):
    """Rounds what it is given to MXFP4."""

    matrix: Mxfp4Matrix
    """`place` are its words."""
    dtype: torch.dtype
    """What the numbers count as, before they are rounded and where they are read as numbers."""

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    @property
    def values(self) -> Tensor:
        return self.matrix.plain(self.dtype)

    @property
    def source_dtype(self) -> torch.dtype:
        return self.dtype

    @torch.no_grad()
    def take(self, part: Tensor) -> None:
        self.matrix.take(*quantize(part.to(self.place.device, self.dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Fill(Mxfp4RoundingFill):
    """Takes a checkpoint's bits."""

    @property
    def shape(self) -> torch.Size:
        rows, columns = self.matrix.shape
        return torch.Size((rows, columns // GROUP, GROUP // 2 + 1))

    @property
    def source_dtype(self) -> torch.dtype:
        return torch.uint8

    @torch.no_grad()
    def take(self, part: Tensor) -> None:
        exponents = part[..., -1]
        largest = int(exponents.max())
        if largest > LARGEST_EXPONENT:
            raise ModelError(
                f"the checkpoint has experts' weights in MXFP4 of more than 2^{largest - BIAS}, "
                "which no model has; it is damaged. Download or copy it again."
            )
        # What is smaller than all that counts may be a little larger; most of it is zeros.
        self.matrix.take(part[..., :-1].flatten(-2), exponents.clamp(min=LEAST_EXPONENT))
