"""FP8 (E4M3): all products of the layers, with scales of rows or of blocks.

Supports four kinds of checkpoints: transformers' `fp8` (scales of blocks or of a tensor),
`fbgemm_fp8` (of rows), `compressed-tensors` (of a tensor, of rows or of blocks) and `modelopt` (of
a tensor or of rows). Unquantized ones are rounded when loaded, each row by its largest number. A
GPU rounds activations by their own largest numbers, so a config's settings for them do not matter.

Scales may be powers of two, a byte each (`ue8m0`). Experts beside such products may be in FP4
(DeepSeek V4): two numbers a byte, with a power of two for 32 of them. They are kept in MXFP4 where
the device has operators for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows, values_of
from manyroots.kernels.fused_moe.weights import ExpertMatrix
from manyroots.kernels.operations import Operand
from manyroots.kernels.scaled import Matrix, ScaledMatrix, quantize_rows
from manyroots.layers.weights.compressed import SCALE, ScaledFormat, groups_of, refuse_several
from manyroots.layers.weights.fill import Fill, FilledRows, Fills
from manyroots.layers.weights.formats import PLAIN, WeightFormat
from manyroots.layers.weights.mxfp4 import KIND, Mxfp4Format, joined, unpacked

FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 instructions."""
_FP4 = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
"""Dtypes in which checkpoints have two numbers of FP4 as one."""
_OF_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""ModelOpt's names of scales of a tensor and of rows."""
_POWERS = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of scales that are powers of two: their exponents, with 127 added."""


@dataclass(frozen=True)
class Fp8Format(ScaledFormat):
    """All products in FP8."""

    name: ClassVar[str] = "FP8"

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: a scale for each row, or for all."""
    expert_format: WeightFormat | None = None
    """The format of experts that the checkpoint has in FP4; None: they are in FP8, too."""

    kinds: ClassVar[tuple[str, ...]] = ("weight", KIND)

    @classmethod
    def stored_in(cls, said: Mapping[str, Any], model_type: str) -> Self | None:
        method = said.get("quant_method")
        if method == "fp8" and said.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
            experts = Mxfp4Format(is_stored=True) if said.get("expert_dtype") == "fp4" else None
            block = _block(said.get("weight_block_size"))
            return cls(is_stored=True, block=block, expert_format=experts)
        is_modelopt = method == "modelopt" and said.get("quant_algo") in _OF_MODELOPT
        if is_modelopt or method == "fbgemm_fp8":
            return cls(is_stored=True)
        groups = groups_of(said)
        if not groups or not all(map(_is_fp8, groups)):
            return None
        blocks = {
            _block(group.get("block_structure") if group["strategy"] == "block" else None)
            for group in groups
        }
        if len(blocks) > 1:
            refuse_several()
        return cls(is_stored=True, block=blocks.pop())

    def is_quantized(self, kind: str, tensor: Tensor) -> bool:
        return kind == "weight" and (tensor.dtype is torch.float8_e4m3fn or self._is_fp4(tensor))

    def _is_fp4(self, tensor: Tensor) -> bool:
        return self.expert_format is not None and tensor.dtype in _FP4

    def spelled(self, name: str, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """float32 [rows, groups], the one form that `kernels/scaled.py` has."""
        num_rows, num_columns = shape
        num_groups = -(-num_columns // self._group(num_columns))
        scales = _as_numbers(scales)
        if self.block is None:
            if scales.numel() == 1:
                return scales.reshape(1, 1).expand(num_rows, num_groups)
            if scales.numel() == num_rows:
                return scales.reshape(num_rows, 1)
        elif list(scales.shape) == [-(-num_rows // self.block[0]), num_groups]:
            return scales.repeat_interleave(self.block[0], 0)[:num_rows]
        each = "a scale each" if self.block is None else f"blocks of {list(self.block)}"
        raise ModelError(
            f"{name} has shape {list(scales.shape)}, which does not belong to {num_rows} rows with "
            f"{each}; config and weights belong to different models."
        )

    def numbers(self, data: Tensor, scales: Tensor) -> Tensor:
        return ScaledMatrix(data, scales, self._group(data.shape[1])).plain(torch.float32)

    def paired(
        self, stem: str, data: Tensor, scales: Tensor, fills: Mapping[str, Fill]
    ) -> tuple[str, Tensor]:
        if not self._is_fp4(data):
            return super().paired(stem, data, scales, fills)
        rows, num_bytes = data.shape
        shape = [rows, num_bytes / 16]  # a fraction equals no size
        if list(scales.shape) != shape or scales.dtype not in _POWERS:
            raise ModelError(
                f"the scales of {stem} have shape {list(scales.shape)} in {scales.dtype}; FP4 has "
                "a power of two for each 32 numbers of a row. Use another checkpoint."
            )
        blocks = data.view(torch.uint8).reshape(rows, -1, 16)
        powers = scales.view(torch.uint8)
        if f"{stem}.{KIND}" in fills:
            return f"{stem}.{KIND}", joined(blocks, powers)
        return f"{stem}.weight", unpacked(blocks, powers)

    def _group(self, num_columns: int) -> int:
        """Columns that share a scale."""
        return num_columns if self.block is None else self.block[1]

    def made_up(self) -> WeightFormat:
        experts = self.expert_format
        return Fp8Format(expert_format=None if experts is None else experts.made_up())

    def on(self, device: torch.device, *, is_asked: bool) -> WeightFormat:
        if self.expert_format is None:
            return self
        return replace(self, expert_format=self.expert_format.on(device, is_asked=False))

    def check(self, device: torch.device) -> None:
        check_gpu(
            device, "FP8 weights need",
            "Serve an unquantized checkpoint, and leave --quantization out",
        )  # fmt: skip

    @property
    def unquantized(self) -> WeightFormat:
        return PLAIN

    @property
    def for_experts(self) -> WeightFormat:
        return self if self.expert_format is None else self.expert_format

    def expert_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        if self.expert_format is None:
            return super().expert_bytes(rows, columns, dtype)
        return self.expert_format.expert_bytes(rows, columns, dtype)

    def num_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        return num_weights + (0 if self.block is None else 4 * num_weights // self.block[1])

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        return self._empty(rows, columns, device=device)

    def experts(self, *shape: int, dtype: torch.dtype, device: torch.device) -> ExpertMatrix:
        return self._empty(*shape, device=device)

    def _empty(self, *shape: int, device: torch.device) -> ScaledMatrix:
        *stack, rows, columns = shape
        group = self._group(columns)
        scales = (*stack, rows, -(-columns // group))
        return ScaledMatrix(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(scales, dtype=torch.float32, device=device),
            group,
        )

    def fills(self, matrix: Matrix | ExpertMatrix, own: FilledRows) -> Fills:
        assert isinstance(matrix, ScaledMatrix)
        name, cut, shard = own.name, own.cut, own.shard
        data, scales = matrix.data[own.rows], matrix.scales[own.rows]
        if not self.is_stored:
            yield f"{name}.weight", RoundingFill(data, cut, shard, scales=scales, dtype=own.dtype)
            return
        yield f"{name}.weight", Fill(data, cut, shard)
        if cut == 1 and self.block is None:
            cut = None
        elif cut == 1 and not shard.is_whole and data.shape[1] % matrix.group:
            raise ConfigError(
                f"--tensor-parallel-size is {shard.size}, and a rank's {data.shape[1]} columns of "
                f"{name} are no multiple of the {matrix.group} that share a scale; choose a "
                "smaller one."
            )
        yield f"{name}.{SCALE}", Fill(scales, cut, shard)

    def row_form(
        self,
        matrix: Operand,
        num_rows: int,
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        keeps_values: bool,
    ) -> Fp8Form | None:
        assert isinstance(matrix, ScaledMatrix)
        if kernels.gemm.is_for(num_rows, matrix, has_adapters=keeps_values):
            return kernels.gemm.form_for(num_rows, matrix, keeps_values)
        if kernels.scaled_gemm.is_for(matrix, dtype):
            return kernels.scaled_gemm.form_for(matrix, keeps_values)
        return None

    def times(
        self, x: Tensor | Fp8Rows, matrix: Matrix, bias: Tensor | None, kernels: Kernels
    ) -> Tensor:
        """Rows are rounded, too, if the kernels have an FP8 product."""
        assert isinstance(matrix, ScaledMatrix)
        if not kernels.scaled_gemm.is_for(matrix, x.dtype):
            return F.linear(values_of(x), matrix.plain(x.dtype), bias)
        return kernels.scaled_gemm.linear(x, matrix, bias)


def _as_numbers(scales: Tensor) -> Tensor:
    """float32; of powers of two, too, whose bytes may be stored as whole numbers."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype in _POWERS else scales).float()


def check_gpu(device: torch.device, what: str, remedy: str) -> None:
    """Refuse FP8 on a GPU without instructions for it; `what` needs them."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"{what} a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell); "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. {remedy}."
        )


def _is_fp8(group: Mapping[str, Any]) -> bool:
    is_known = group.get("strategy") in ("tensor", "channel", "block")
    return is_known and group.get("num_bits") == 8 and group.get("type") == "float"


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(
            f"the checkpoint's blocks of weights are {sizes!r}; they must be two sizes above 0. "
            "Correct its config.json."
        )
    return sizes[0], sizes[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingFill(Fill):
    """Rounds its input to FP8."""

    scales: Tensor
    dtype: torch.dtype
    """Dtype of the checkpoint's numbers before they are rounded."""

    @property
    def nbytes(self) -> int:
        return self.place.nbytes + self.scales.nbytes

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
