"""Inputs for the Triton kernels, which run in Triton's interpreter where there is no GPU.

Import this before any `kernels.*.triton`: the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed: the GPU kernels are NOT tested")

if DEVICE.type == "cpu":
    import tests.unit.kernels.quick_interpreter  # noqa: F401

from manyroots.kernels.lora_ops.sites import LinearSite, LoraRows  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
"""The interpreter's bfloat16 products are wrong, so bfloat16 is for real devices only."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def make_site(
    in_features: int,
    part_sizes: tuple[int, ...],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
) -> LinearSite:
    """A pool with the weights of len(ranks) slots; `ranks[slot][part]` may be 0."""
    pieces: list[Tensor] = [randn(8, dtype=dtype, seed=seed)]  # so that no offset is 0
    used = 8

    def put(*shape: int) -> int:
        nonlocal used
        piece = randn(*shape, dtype=dtype, seed=seed + used).flatten() * shape[-1] ** -0.5
        pieces.append(piece)
        used += piece.numel()
        return used - piece.numel()

    table = []
    for slot_ranks in ranks:
        entry, start = [put(sum(slot_ranks), in_features), sum(slot_ranks)], 0
        for size, rank in zip(part_sizes, slot_ranks, strict=True):
            entry += [start, rank, put(size, rank) if rank else 0]
            start += rank
        table.append(entry)
    scalings = randn(len(ranks), len(part_sizes), seed=seed).abs() + 0.5
    return LinearSite(
        pool=torch.cat(pieces),
        table=torch.tensor(table, dtype=torch.int64, device=DEVICE),
        scalings=scalings,
        part_sizes=part_sizes,
        max_rank=max(max(slot_ranks) for slot_ranks in ranks),
    )


def make_rows(*slots: int, block_rows: int = 16) -> LoraRows:
    return LoraRows.build(slots, DEVICE, block_rows=block_rows)
