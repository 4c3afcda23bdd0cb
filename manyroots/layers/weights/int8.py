"""INT8 with a scale for each row: all products of the layers but experts (W8A16).

Checkpoints are compressed-tensors', symmetric, with a scale for each row or for all. They hold
bytes in words (`pack-quantized`: a word has four columns, each plus 128) or plain bytes
(`int-quantized`). Activations are not rounded, even if the checkpoint was made for rounded ones.
Experts, and other weights that are unquantized here, are converted when loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.fused_moe.weights import ExpertMatrix
from manyroots.kernels.scaled import Int8Matrix, Matrix, quantize_rows_int8
from manyroots.layers.weights.compressed import SCALE, ScaledFormat, groups_of
from manyroots.layers.weights.fill import Fill, FilledRows, Fills
from manyroots.layers.weights.formats import PLAIN, WeightFormat
from manyroots.layers.weights.fp8 import RoundingFill

PACKED = "weight_packed"
_OFFSET = 128


@dataclass(frozen=True)
class Int8Format(ScaledFormat):
    """All products in INT8, experts in the model's dtype."""

    name: ClassVar[str] = "INT8"

    @classmethod
    def stored_in(cls, said: Mapping[str, Any], model_type: str) -> Self | None:
        groups = groups_of(said)
        return cls(is_stored=True) if groups and all(map(_is_int8, groups)) else None

    def is_quantized(self, kind: str, tensor: Tensor) -> bool:
        return kind == PACKED or (kind == "weight" and tensor.dtype is torch.int8)

    def spelled(self, name: str, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """float32 [rows, 1]"""
        num_rows = shape[0]
        if scales.numel() not in (1, num_rows):
            raise ModelError(
                f"{name} has shape {list(scales.shape)}, which does not belong to {num_rows} rows "
                "with a scale each; config and weights belong to different models."
            )
        return scales.float().reshape(-1, 1).expand(num_rows, 1)

    def unpacked(self, data: Tensor, num_columns: int) -> Tensor:
        return data if data.dtype is torch.int8 else _from_words(data, num_columns)

    def numbers(self, data: Tensor, scales: Tensor) -> Tensor:
        return Int8Matrix(data, scales).plain(torch.float32)

    def made_up(self) -> WeightFormat:
        return Int8Format()

    @property
    def unquantized(self) -> WeightFormat:
        return PLAIN

    def num_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        return num_weights

    def expert_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return PLAIN.expert_bytes(rows, columns, dtype)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        return Int8Matrix(
            torch.empty(rows, columns, dtype=torch.int8, device=device),
            torch.empty(rows, 1, dtype=torch.float32, device=device),
        )

    def fills(self, matrix: Matrix | ExpertMatrix, own: FilledRows) -> Fills:
        if not isinstance(matrix, Int8Matrix):  # an expert's
            yield from PLAIN.fills(matrix, own)
            return
        name, cut, shard = own.name, own.cut, own.shard
        data, scales = matrix.data[own.rows], matrix.scales[own.rows]
        if self.is_stored:
            yield f"{name}.weight", Fill(data, cut, shard)
            yield f"{name}.{SCALE}", Fill(scales, 0 if cut == 0 else None, shard)
        else:
            rounding = Int8RoundingFill(data, cut, shard, scales=scales, dtype=own.dtype)
            yield f"{name}.weight", rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8RoundingFill(RoundingFill):
    """Rounds its input to INT8."""

    @torch.no_grad()
    def take(self, part: Tensor) -> None:
        data, scales = quantize_rows_int8(part.to(self.place.device, self.dtype))
        self.place.copy_(data)
        self.scales.copy_(scales)


def _is_int8(group: Mapping[str, Any]) -> bool:
    is_known = group.get("strategy") in ("tensor", "channel") and group.get("symmetric", True)
    return bool(is_known and group.get("num_bits") == 8 and group.get("type") == "int")


def _from_words(words: Tensor, columns: int) -> Tensor:
    """int32 [rows, columns / 4], the lowest byte first, as int8 [rows, columns]."""
    data = words.contiguous().view(torch.uint8)[:, :columns]
    return (data.to(torch.int16) - _OFFSET).to(torch.int8)
