"""INT8 with a scale for each row: all products of the layers but experts (W8A16).

Checkpoints are compressed-tensors', symmetric, with a scale for each row or for all. They hold
bytes in words (`pack-quantized`: a word has four columns, each plus 128) or plain bytes
(`int-quantized`). Activations are not rounded, even if the checkpoint was made for rounded ones.
Experts, and other weights that are unquantized here, are converted when loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.fused_moe.weights import ExpertMatrix
from manyroots.kernels.scaled import Int8Matrix, Matrix, quantize_rows_int8
from manyroots.layers.weights.compressed import SCALE, groups_of, is_of_activations
from manyroots.layers.weights.fill import Fill, FilledRows, Fills
from manyroots.layers.weights.formats import PLAIN, NamedTensors, WeightFormat
from manyroots.layers.weights.fp8 import RoundingFill

PACKED, _SHAPE = "weight_packed", "weight_shape"
_OFFSET = 128


@dataclass(frozen=True)
class Int8Format(WeightFormat):
    """All products in INT8, experts in the model's dtype."""

    name: ClassVar[str] = "INT8"

    @classmethod
    def stored_in(cls, said: Mapping[str, Any], model_type: str) -> Self | None:
        groups = groups_of(said)
        return cls(is_stored=True) if groups and all(map(_is_int8, groups)) else None

    def read(
        self, weights: NamedTensors, fills: Mapping[str, Fill]
    ) -> Iterator[tuple[str, Tensor]]:
        """Passes on weights and scales to fills for both. For other fills, a weight and its scales
        wait for each other and become plain numbers."""
        waiting: dict[str, Tensor] = {}
        for name, tensor in weights:
            stem, _, kind = name.rpartition(".")
            place = fills.get(f"{stem}.weight")
            if is_of_activations(kind) or kind == _SHAPE:
                continue
            if kind == SCALE and place is not None:
                part = _by_row(name, tensor, place.whole_shape[0])
            elif kind == PACKED and place is not None:
                part, kind = _unpacked(tensor, place.whole_shape[1]), "weight"
            elif kind == "weight" and tensor.dtype is torch.int8:
                part = tensor
            else:
                if kind == "weight" and f"{stem}.{SCALE}" in fills:
                    raise ModelError(
                        f"{name} is in {tensor.dtype}, and is expected INT8; use a checkpoint in "
                        "which all projections of the layers are quantized."
                    )
                yield name, tensor
                continue
            if f"{stem}.{SCALE}" in fills:
                yield f"{stem}.{kind}", part
            elif stem in waiting:
                yield f"{stem}.weight", waiting.pop(stem).float() * part.float()
            else:
                waiting[stem] = part
        if waiting:
            raise ModelError(
                f"the checkpoint has {min(waiting)} in INT8 without its scales, or scales without "
                "it. Download or copy it again."
            )

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


def _by_row(name: str, scales: Tensor, rows: int) -> Tensor:
    if scales.numel() not in (1, rows):
        raise ModelError(
            f"{name} has shape {list(scales.shape)}, which does not belong to {rows} rows with a "
            "scale each; config and weights belong to different models."
        )
    return scales.float().reshape(-1, 1).expand(rows, 1)


def _unpacked(words: Tensor, columns: int) -> Tensor:
    """int32 [rows, columns / 4], the lowest byte first, as int8 [rows, columns]."""
    data = words.contiguous().view(torch.uint8)[:, :columns]
    return (data.to(torch.int16) - _OFFSET).to(torch.int8)
