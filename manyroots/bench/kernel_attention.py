"""Attention of a layer alone: single tokens after long histories, and prompts.

Takes a layer's shape and sequences in numbers; gives cases for `kernel_times.py`. Pages lie in
random order, as in a busy engine, and layers are read in turn, so that none is in a cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyroots.bench.kernel_times import KernelCase, measured, num_copies
from manyroots.errors import ConfigError
from manyroots.kernels.attention.paged import (
    AttentionMetadata,
    DecodeRows,
    longest_first,
    query_blocks,
)
from manyroots.kernels.attention.reference import decode_attention
from manyroots.kernels.choice import Kernels
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping
from manyroots.layers.memories import Memory
from manyroots.layers.spec import AttentionSpec

PAGE_SIZE = 16
MOST_CHECKED = 64
"""Queries that are compared with the reference, which takes them one by one."""
MOST_LAYERS = 6
_FORM = re.compile(r"(?:(\d+)x)?(\d+)(?:-(\d+))?(?:@(\d+))?")


@dataclass(frozen=True, slots=True)
class Sequences:
    """`64x576`, `256x64-1280` or `2x512@8000`: how many, of which lengths (drawn evenly from one
    seed), after how many tokens."""

    text: str
    lens: tuple[int, ...]
    before: int

    @classmethod
    def read(cls, text: str) -> Sequences:
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"{text!r} says no sequences; write 64x576, 256x64-1280 or 2x512@8000 (how many, "
                "their tokens, and how many tokens are before those)."
            )
        count, low, high, before = (int(group or 0) for group in found.groups())
        high = high or low
        if not 1 <= low <= high or (found[1] and count < 1):
            raise ConfigError(f"{text!r} says no sequences: lengths are 1 and more, low to high.")
        rng = np.random.default_rng(0)
        lens = rng.integers(low, high + 1, count or 1).tolist()
        return cls(text, tuple(lens), before)


def measure_decodes(
    spec: AttentionSpec,
    sequences: Sequences,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """One query for each sequence, which sees all of it."""
    lens = np.array([sequences.before + length for length in sequences.lens])
    step = Pages(spec.memory, lens, dtype, device)
    q = randn(step.generator, len(lens), spec.num_heads, spec.memory.head_dim, dtype=dtype)
    order = longest_first(lens.astype(np.int32))
    rows = AttentionMetadata(
        page_table=step.table,
        context_lens=step.lens,
        num_decodes=len(lens),
        query_starts=None,
        blocks=None,
        slot_mapping=_nowhere(len(lens), device),
        order=None if order is None else torch.from_numpy(order).to(device),
    )
    checked = spread_out(len(lens))
    return _measured(
        "decodes", spec, sequences, step, q, rows, kernels, repeats, checked,
        DecodeRows(step.table[checked], step.lens[checked]),
        num_pairs=int(lens.sum()), num_read=int(lens.sum()),
    )  # fmt: skip


def measure_prompts(
    spec: AttentionSpec,
    sequences: Sequences,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """All queries of each prompt, after what was computed before."""
    counts = np.array(sequences.lens)
    lens = counts + sequences.before
    step = Pages(spec.memory, lens, dtype, device)
    starts = [0, *accumulate(counts.tolist())]
    q = randn(step.generator, starts[-1], spec.num_heads, spec.memory.head_dim, dtype=dtype)
    rows = AttentionMetadata(
        page_table=step.table,
        context_lens=step.lens,
        num_decodes=0,
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        blocks=torch.from_numpy(query_blocks(starts, lens.tolist())).to(device),
        slot_mapping=_nowhere(starts[-1], device),
    )
    # A prompt's query sees what a decoding one would after as many tokens.
    checked = spread_out(starts[-1])
    owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))[checked]
    seen = checked - torch.tensor(starts)[owner] + sequences.before + 1
    pairs = int((counts * (counts + 1) // 2 + counts * sequences.before).sum())
    return _measured(
        "prompts", spec, sequences, step, q, rows, kernels, repeats, checked,
        DecodeRows(step.table[owner.to(device)], seen.to(device, torch.int32)),
        num_pairs=pairs, num_read=int(lens.sum()),
    )  # fmt: skip


class Pages:
    """What some layers keep of their tokens, in pages at random places."""

    def __init__(
        self,
        memory: Memory,
        lens: np.ndarray,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        pages = -(-lens // PAGE_SIZE)
        num_pages = int(pages.sum())
        layer_bytes = memory.unit_bytes(int(lens.sum()), 1, dtype)
        self.num_layers = num_copies(layer_bytes, most=MOST_LAYERS)
        arena = memory.make_arena(num_pages, PAGE_SIZE, self.num_layers, dtype, device)
        self.generator = torch.Generator(device).manual_seed(1)
        arena.data.normal_(generator=self.generator)
        self.layers = [arena.layer(index) for index in range(self.num_layers)]
        order = np.random.default_rng(3).permutation(num_pages).astype(np.int32)
        table = np.zeros((len(lens), int(pages.max())), np.int32)
        at = 0
        for row, count in enumerate(pages.tolist()):
            table[row, :count] = order[at : at + count]
            at += count
        self.table = torch.from_numpy(table).to(device)
        self.lens = torch.from_numpy(lens.astype(np.int32)).to(device)


def _measured(
    part: str,
    spec: AttentionSpec,
    sequences: Sequences,
    step: Pages,
    q: Tensor,
    rows: AttentionMetadata,
    kernels: Kernels,
    repeats: int,
    checked: Tensor,
    as_decodes: DecodeRows,
    *,
    num_pairs: int,
    num_read: int,
) -> dict[str, Any]:
    """`checked`: which queries are compared, and `as_decodes` what each of them sees."""
    attention, memory = kernels.attention, spec.memory
    case = KernelCase(
        part=part, name="attend", rows=sequences.text, way="ours",
        num_bytes=memory.unit_bytes(num_read, 1, q.dtype),
        num_flops=4.0 * num_pairs * spec.num_heads * memory.head_dim, tolerance="attention",
    )  # fmt: skip

    def make() -> list[Callable[[], Tensor]]:
        attending = attention.prepare(rows, PAGE_SIZE, q.dtype)
        return [partial(attention.attend, q, kv, attending, spec.scale) for kv in step.layers]

    def compare(out: Tensor) -> tuple[Tensor, Tensor]:
        at = checked.to(q.device)
        right = decode_attention(q[at], step.layers[0], as_decodes, spec.scale)
        return out[at], right

    return measured(case, make, compare, repeats, q.device)


def spread_out(count: int) -> Tensor:
    """Places among so many, the first and the last of them included."""
    return torch.linspace(0, count - 1, min(count, MOST_CHECKED)).round().long()


def _nowhere(count: int, device: torch.device) -> SlotMapping:
    """Nothing is written: keys and values lie there."""
    none = torch.full((count,), -1, dtype=torch.int32, device=device)
    return SlotMapping(none, none)


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)
