"""Inputs of the latent attention kernels, apart from tensors.

A page holds one row per token: the normalised latent, then the rotated part that all heads share.
In FP8 a row is bytes: the numbers, padding to 16, then a scale for either part and 8 unused bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.lora_ops.sites import LinearSite, LoraRows
from manyroots.kernels.scaled import LARGEST

ROW_STEP = 16
"""A row in FP8 is a multiple of this many bytes, plus as many bytes for scales."""


@dataclass(frozen=True, slots=True)
class LatentNorm:
    """The norm of latents."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class IndexNorm:
    """The norm of an index's keys, which also subtracts their mean."""

    weight: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LatentAdapters:
    """The adapters of `kv_b_proj`, which maps a latent to the keys and values of all heads."""

    site: LinearSite
    """One part: heads * (nope + v) rows of B."""
    rows: LoraRows
    """The adapters of these tokens. A kernel that takes tokens one by one needs only `slots`."""


@dataclass(frozen=True, slots=True)
class SplitKeys:
    """Expanded keys in the two parts that they are computed in."""

    own: Tensor
    """[keys, heads, nope]: each head's own part."""
    shared: Tensor
    """[keys, rope]: what comes after it, the same for all heads."""


@dataclass(frozen=True, slots=True)
class KeyPiece:
    """Sequences' queries, and a piece of each sequence's keys. Both are ordered by sequence."""

    query_starts: Tensor
    """int32 [num_seqs + 1]"""
    key_starts: Tensor
    """int32 [num_seqs + 1]"""
    first_seen: Tensor
    """int32 [num_seqs]: query i of a sequence sees the first `first_seen + i + 1` of its keys here.
    It sees none if that is below 1, and all if it is beyond the last."""
    max_queries: int
    """The most of one sequence."""


def row_bytes(width: int) -> int:
    """Bytes of a row of `width` numbers in FP8."""
    return -(-width // ROW_STEP) * ROW_STEP + ROW_STEP


def as_fp8_rows(rows: Tensor, latent: int) -> Tensor:
    """uint8 [tokens, row_bytes] of rows [tokens, width]."""
    num_rows, width = rows.shape
    packed = rows.new_zeros(num_rows, row_bytes(width), dtype=torch.uint8)
    scales = rows.new_zeros(num_rows, ROW_STEP // 4, dtype=torch.float32)
    for place, part in enumerate((slice(0, latent), slice(latent, width))):
        numbers = rows[:, part].float()
        if numbers.shape[1] == 0:
            continue
        scale = numbers.abs().amax(1).clamp(min=1e-12) / LARGEST
        scales[:, place] = scale
        small = (numbers / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        packed[:, part] = small.view(torch.uint8)
    packed[:, -ROW_STEP:] = scales.view(torch.uint8)
    return packed


def from_fp8_rows(packed: Tensor, width: int, latent: int, dtype: torch.dtype) -> Tensor:
    """Rows [..., width] unpacked from the result of `as_fp8_rows`."""
    scales = packed[..., -ROW_STEP:].contiguous().view(torch.float32)
    numbers = packed[..., :width].contiguous().view(torch.float8_e4m3fn).float()
    latents = numbers[..., :latent] * scales[..., 0:1]
    return torch.cat((latents, numbers[..., latent:] * scales[..., 1:2]), dim=-1).to(dtype)
