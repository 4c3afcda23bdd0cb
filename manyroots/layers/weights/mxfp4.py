"""MXFP4, for experts only: 4 bits a number, with a power of two for each 32 numbers.

gpt-oss' experts are published in it, and DeepSeek V4's beside products in FP8 (`fp8.py`). Stored
ones are copied bit by bit and only reordered; others are rounded when loaded. For unquantized
destinations they are unpacked. In bfloat16 every value is exact except for the smallest powers,
which no weight has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.fused_moe.weights import ExpertMatrix
from manyroots.kernels.mxfp4 import (
    BIAS,
    GROUP,
    LARGEST_EXPONENT,
    LEAST_EXPONENT,
    Mxfp4Matrix,
    padded_bytes,
    quantize,
    values_of,
)
from manyroots.kernels.scaled import Matrix
from manyroots.layers.weights.fill import Fill, FilledRows, Fills
from manyroots.layers.weights.formats import PLAIN, NamedTensors, WeightFormat

METHOD = "mxfp4"
KIND = "weight_mxfp4"
"""Suffix of a checkpoint's name after a projection: uint8 [rows, groups, 16 bytes of two numbers
and an exponent], so that ranks cut it like the numbers."""
_MODEL_TYPE = "gpt_oss"
"""The only type of model that is published in it."""


@dataclass(frozen=True)
class Mxfp4Format(WeightFormat):
    """Experts in MXFP4; all other products in the model's dtype."""

    name: ClassVar[str] = "MXFP4"

    @classmethod
    def stored_in(cls, said: Mapping[str, Any], model_type: str) -> Self | None:
        is_own = said.get("quant_method") == METHOD and model_type == _MODEL_TYPE
        return cls(is_stored=True) if is_own else None

    @classmethod
    def rounding(cls, model_type: str) -> WeightFormat:
        if model_type != _MODEL_TYPE:
            raise ConfigError(
                f"--quantization is {METHOD!r}, which is for the experts of gpt-oss, and the model "
                f"is {model_type!r}; leave the flag out, or choose 'fp8'."
            )
        return cls()

    def read(
        self, weights: NamedTensors, fills: Mapping[str, Fill]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            stem, _, kind = name.rpartition(".")
            if kind == KIND and name not in fills:
                yield f"{stem}.weight", unpacked(tensor[..., :-1], tensor[..., -1])
            else:
                yield name, tensor

    def on(self, device: torch.device, *, is_asked: bool) -> WeightFormat:
        """No CPU has operators for MXFP4, so a CPU keeps experts in it only on request."""
        return PLAIN if device.type == "cpu" and not is_asked else self

    def made_up(self) -> WeightFormat:
        return Mxfp4Format()

    @property
    def unquantized(self) -> WeightFormat:
        return PLAIN

    def expert_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return padded_bytes(rows, columns)

    def experts(self, *shape: int, dtype: torch.dtype, device: torch.device) -> ExpertMatrix:
        if shape[-1] % GROUP:
            raise ConfigError(
                f"experts with rows of {shape[-1]} numbers can't be kept in MXFP4, in which "
                f"{GROUP} share an exponent; choose a smaller --tensor-parallel-size, or an "
                "unquantized checkpoint."
            )
        return Mxfp4Matrix.empty(*shape, device=device)

    def fills(self, matrix: Matrix | ExpertMatrix, own: FilledRows) -> Fills:
        if not isinstance(matrix, Mxfp4Matrix):  # no expert's
            yield from PLAIN.fills(matrix, own)
            return
        part = matrix[own.rows]
        kind, fill = (KIND, Mxfp4Fill) if self.is_stored else ("weight", Mxfp4RoundingFill)
        yield (
            f"{own.name}.{kind}",
            fill(part.words, own.cut, own.shard, matrix=part, dtype=own.dtype),
        )


def joined(blocks: Tensor, scales: Tensor) -> Tensor:
    """A matrix's packed numbers [rows, groups, 16] and exponents [rows, groups] as one."""
    return torch.cat((blocks, scales.unsqueeze(-1)), dim=-1)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [rows, groups, 16], two numbers a byte, the lower half first; scales uint8
    [rows, groups], the exponents. Gives bfloat16 [rows, 32 * groups]."""
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-3)
    return values_of(codes, scales).to(torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4RoundingFill(Fill):
    """Rounds its input to MXFP4."""

    matrix: Mxfp4Matrix
    """`place` holds its words."""
    dtype: torch.dtype
    """Dtype of the numbers before rounding, and when they are read as numbers."""

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

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
        # Numbers below the smallest relevant value may become a little larger; most are zeros.
        self.matrix.take(part[..., :-1].flatten(-2), exponents.clamp(min=LEAST_EXPONENT))
