"""Steps to attend over: pages in shuffled order, sequences of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.attention.paged import AttentionMetadata, query_blocks
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping
from manyroots.layers.memories import KV
from manyroots.store.arena import Arena

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and pages of a case."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4


def make_rows(
    sequences: Sequence[tuple[int, int]],
    page_size: int,
    *,
    window: int = 0,
    num_shared: int = 0,
    num_decodes: int | None = None,
    seed: int = 0,
) -> tuple[AttentionMetadata, int]:
    """A step of (num_queries, context_len) sequences, decodes first; and how many pages it has.

    All sequences begin with the same `num_shared` pages. Pages that no query of a sequence sees are
    no longer its own: their table entries name page `num_pages - 1`, which no sequence holds.
    """
    counts = [-(-context // page_size) for _, context in sequences]
    num_pages = sum(counts) + 3
    shuffled = np.random.default_rng(seed).permutation(num_pages - 1)
    table = np.full((len(sequences), max(counts) + 1), num_pages - 1, dtype=np.int32)
    pages, offsets, used = [], [], 0
    for row, ((num_queries, context), count) in enumerate(zip(sequences, counts, strict=True)):
        table[row, :count] = shuffled[used : used + count]
        if context:
            table[row, :num_shared] = shuffled[:num_shared]
        used += count
        positions = np.arange(context - num_queries, context)
        pages.append(table[row, positions // page_size] if context else np.full(1, -1))
        offsets.append(positions % page_size)
        if window:
            first = max(0, context - num_queries + 1 - window)
            table[row, : first // page_size] = num_pages - 1
    if num_decodes is None:
        num_decodes = 0
        while num_decodes < len(sequences) and sequences[num_decodes][0] == 1:
            num_decodes += 1
    starts = np.cumsum([num_decodes, *(num_queries for num_queries, _ in sequences[num_decodes:])])
    lens = [context for _, context in sequences]
    has_prompts = num_decodes < len(sequences)
    rows = AttentionMetadata(
        page_table=torch.from_numpy(table),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        num_decodes=num_decodes,
        query_starts=torch.from_numpy(starts.astype(np.int32)) if has_prompts else None,
        blocks=torch.from_numpy(query_blocks(starts.tolist(), lens[num_decodes:]))
        if has_prompts
        else None,
        slot_mapping=SlotMapping(
            torch.from_numpy(np.concatenate(pages).astype(np.int32)),
            torch.from_numpy(np.concatenate(offsets).astype(np.int32)),
        ),
        window=window,
    )
    return rows, num_pages


def random_arena(num_pages: int, shape: Shape, dtype: torch.dtype, num_layers: int = 2) -> Arena:
    memory = KV(shape.kv_heads, shape.head_dim, window=None)
    arena = memory.make_arena(num_pages, shape.page_size, num_layers, dtype, CPU)
    arena.data.normal_(generator=torch.Generator().manual_seed(1))
    return arena


def random_q(num_tokens: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_tokens, shape.heads, shape.head_dim, generator=generator).to(dtype)
