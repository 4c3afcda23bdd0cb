"""Pages of attention in Triton: NaN wherever a query may not look."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, randn

from manyroots.kernels.attention.paged import AttentionMetadata, query_blocks  # isort: skip
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping  # isort: skip

SCALE = 0.3
PAGE = 4


def pages_for(
    lens: list[int],
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    firsts: list[int] | None = None,
    page: int = PAGE,
) -> tuple[Tensor, Tensor]:
    """One layer's view of an arena, NaN wherever no sequence's token lies; and page tables.

    `firsts`: of each sequence, the first token that a query sees; those before are NaN, and in the
    place of pages that hold no other is one that is another's.
    """
    counts = [-(-length // page) for length in lens]
    arena = torch.full((sum(counts) + 2, 2, 2, page, kv_heads, dim), float("nan"), dtype=dtype)
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3))
    table = torch.full((len(lens), max(*counts, 1)), int(order[-1]), dtype=torch.int32)
    used = 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        first = firsts[row] if firsts else 0
        table[row, first // page : count] = order[used : used + count - first // page]
        used += count
        for token in range(first, length):
            arena[int(table[row, token // page]), 1, :, token % page] = randn(
                2, kv_heads, dim, seed=1000 * row + token
            ).to("cpu", dtype)
    return arena.to(DEVICE)[:, 1], table.to(DEVICE)


def step_of(
    decodes: list[int],
    prompts: list[tuple[int, int]],
    window: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Queries, pages and rows of a step: the contexts of decodes, then (queries, context)."""
    heads, kv_heads, dim = shape
    lens = [*decodes, *(context for _, context in prompts)]
    counts = [*(1 for _ in decodes), *(count for count, _ in prompts)]
    firsts = [
        max(0, length - count + 1 - window) if window else 0
        for length, count in zip(lens, counts, strict=True)
    ]
    layer_kv, table = pages_for(lens, kv_heads, dim, dtype, firsts)
    starts = [len(decodes)]
    for count, _ in prompts:
        starts.append(starts[-1] + count)
    nowhere = torch.full((sum(counts),), -1, dtype=torch.int32, device=DEVICE)
    blocks = query_blocks(starts, lens[len(decodes) :])
    rows = AttentionMetadata(
        page_table=table,
        context_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        num_decodes=len(decodes),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE) if prompts else None,
        blocks=torch.from_numpy(blocks).to(DEVICE) if prompts else None,
        slot_mapping=SlotMapping(nowhere, nowhere),
        window=window,
    )
    return randn(sum(counts), heads, dim, dtype=dtype), layer_kv, rows
