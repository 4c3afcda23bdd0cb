"""Paged attention in Triton against the naive reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from manyroots.kernels.attention import reference  # isort: skip
from manyroots.kernels.attention import triton as fast  # isort: skip
from manyroots.kernels.attention.paged import (  # isort: skip
    DecodeRows,
    AttentionMetadata,
    PrefillSegments,
    SharedPrefixes,
    query_blocks,
)
from manyroots.kernels.attention.sharing import PrefixGroup, shared_arrays  # isort: skip
from manyroots.kernels.attention.triton_prefill import PrefillTiling  # isort: skip
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tiling", "window", "has_sinks", "heads", "kv_heads", "dim"),
    [
        (fast.DecodeTiling(1, 16, 1, 3, pages_ahead=False), 0, False, 4, 1, 32),
        (fast.DecodeTiling(1, 16, 1, 3, pages_ahead=False), 9, True, 6, 2, 16),
        (fast.DecodeTiling(1, 16, 1, 4, pages_ahead=True), 0, False, 6, 2, 16),
        (fast.DecodeTiling(1, 16, 1, 4, pages_ahead=True), 9, True, 4, 1, 32),
        (fast.DecodeTiling(4, 16, 1, 3, pages_ahead=False), 0, False, 4, 1, 32),
        (fast.DecodeTiling(4, 16, 1, 3, pages_ahead=False), 9, True, 6, 2, 16),
        (fast.DecodeTiling(4, 16, 2, 2, pages_ahead=True), 0, False, 6, 2, 16),
        (fast.DecodeTiling(4, 16, 2, 2, pages_ahead=True), 9, True, 4, 1, 32),
    ],
)
def test_decode_reads_what_a_row_sees_and_nothing_else(
    tiling: fast.DecodeTiling,
    window: int,
    has_sinks: bool,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    lens = [1, 16, 17, 70, 33, 64]
    layer_kv, table = pages_for(lens, kv_heads, dim, dtype)
    rows = DecodeRows(table, torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    q = randn(len(lens), heads, dim, dtype=dtype)
    sinks = randn(heads, seed=8) if has_sinks else None
    for _ in range(2):  # the counters must be as they were
        out = fast.decode_attention(
            q, layer_kv, rows, SCALE, window=window, sinks=sinks, tiling=tiling
        )
        expected = reference.decode_attention(q, layer_kv, rows, SCALE, window=window, sinks=sinks)
        assert_close("attention", out, expected, dtype)


@pytest.mark.parametrize(
    ("num_rows", "kv_heads", "window", "parts"),
    [(1, 8, 0, 16), (64, 4, 0, 2), (64, 8, 0, 2), (128, 8, 0, 1), (1, 8, 33, 2), (64, 4, 20, 1)],
)
def test_as_many_parts_as_fill_a_chip_and_have_a_tile(
    num_rows: int, kv_heads: int, window: int, parts: int
) -> None:
    assert fast.tiling_for(num_rows, kv_heads, 128, window, is_half=True).parts == parts


SEGMENTS = [[(5, 5), (1, 30), (20, 45)], [(150, 160)], [(130, 200), (70, 70)]]
TILINGS = [
    PrefillTiling(queries=128, tokens=16, num_warps=4),
    PrefillTiling(queries=64, tokens=32, num_warps=8, heads=2),
    None,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "has_sinks", "parts"),
    [(4, 1, 32, False, 1), (6, 2, 16, True, 2), (16, 1, 16, False, 1)],
)
def test_what_rows_share_is_read_once_and_changes_nothing(
    heads: int,
    kv_heads: int,
    dim: int,
    has_sinks: bool,
    parts: int,
    dtype: torch.dtype,
) -> None:
    """Two groups of different lengths, one of them more than a block, and rows of no group."""
    lens = [145, 3, *range(70, 88), 141, 142, 160, 0, 30]
    groups = [PrefixGroup(np.array([0, 20, 21, 22]), 35), PrefixGroup(np.arange(2, 20), 17)]
    layer_kv, table = pages_for(lens, kv_heads, dim, dtype)
    for group in groups:
        table[group.members, : group.num_pages] = table[group.members[0], : group.num_pages]
    arrays = shared_arrays(groups, len(lens), PAGE)
    shared = SharedPrefixes(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
    context = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = randn(len(lens), heads, dim, dtype=dtype)
    sinks = randn(heads, seed=8) if has_sinks else None
    wanted = reference.decode_attention(q, layer_kv, DecodeRows(table, context), SCALE, sinks=sinks)
    is_there = context > 0
    tiling = fast.DecodeTiling(parts, 32, 2, 2, pages_ahead=True)
    for _ in range(2):  # the counters must be as they were
        out = fast.decode_attention(
            q, layer_kv, DecodeRows(table, context, shared), SCALE, sinks=sinks, tiling=tiling
        )
        assert_close("attention", out[is_there], wanted[is_there], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("segments", "window", "has_sinks", "tiling"),
    [
        (segments, *window, TILINGS[(i + j) % len(TILINGS)])
        for i, segments in enumerate(SEGMENTS)
        for j, window in enumerate([(0, False), (7, True), (100, False)])
    ],
)
def test_prefill_is_causal_over_a_paged_prefix(
    segments: list[tuple[int, int]],
    window: int,
    has_sinks: bool,
    tiling: PrefillTiling | None,
    dtype: torch.dtype,
) -> None:
    """Tiles that are masked and tiles that are not, on both sides of a window's edge; heads of one
    program have the same keys. Any two of segments, windows and tilings meet."""
    heads, kv_heads, dim = 6, 3, 16
    lens = [context for _, context in segments]
    layer_kv, table = pages_for(lens, kv_heads, dim, dtype)
    starts = [0]
    for num_queries, _ in segments:
        starts.append(starts[-1] + num_queries)
    batch = PrefillSegments(
        table,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        torch.from_numpy(query_blocks(starts, lens)).to(DEVICE),
    )
    q = randn(starts[-1], heads, dim, dtype=dtype)
    sinks = randn(heads, seed=8) if has_sinks else None
    out = fast.prefill_attention(
        q, layer_kv, batch, SCALE, window=window, sinks=sinks, tiling=tiling
    )
    expected = reference.prefill_attention(q, layer_kv, batch, SCALE, window=window, sinks=sinks)
    assert_close("attention", out, expected, dtype)


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


STEPS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([1, 15, 0, 16, 17, 31, 33, 66], []),
    ([], [(1, 1), (33, 33), (16, 47), (1, 64)]),
    ([40, 9], [(17, 50), (3, 3)]),
]
"""Decodes alone, one of which only pads; prompts alone; and both."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "has_sinks"),
    [(0, False), (0, True), (1, True), (7, False), (8, True), (9, False), (15, True), (17, False),
     (32, True)],
)  # fmt: skip
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "prompts", "both"])
def test_a_window_reads_nothing_in_front_of_it(
    step: tuple[list[int], list[tuple[int, int]]],
    window: int,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    """Windows of pages and of tiles, and one more and less; what lies in front of them is
    another's by now."""
    q, layer_kv, rows = step_of(*step, window, (4, 2, 16), dtype)
    sinks = randn(4, seed=8) if has_sinks else None
    metadata = fast.prepare(rows, PAGE, q.dtype)
    out = fast.attend(q, layer_kv, metadata, SCALE, sinks)
    expected = reference.attend(q, layer_kv, reference.prepare(rows, PAGE, q.dtype), SCALE, sinks)
    live = torch.ones(len(q), dtype=torch.bool)
    live[: len(step[0])] = torch.tensor(step[0]) > 0
    assert expected[live].isfinite().all()
    assert_close("attention", out[live], expected[live], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.3, 2.0, 50.0])
@pytest.mark.parametrize("window", [0, 9])
def test_capped_scores_equal_the_reference(window: int, cap: float, dtype: torch.dtype) -> None:
    """A cap that most scores are beyond, near and far from; of decodes and of prompts."""
    q, layer_kv, rows = step_of([40, 9], [(17, 50), (3, 3)], window, (4, 2, 16), dtype)
    out = fast.attend(q, layer_kv, fast.prepare(rows, PAGE, q.dtype), SCALE, None, cap)
    naive = reference.prepare(rows, PAGE, q.dtype)
    expected = reference.attend(q, layer_kv, naive, SCALE, None, cap)
    assert_close("attention", out, expected, dtype)
    uncapped = reference.attend(q, layer_kv, naive, SCALE)
    assert cap > 2.0 or (expected - uncapped).abs().max() > 1e-2, "it changes something"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 1, 256), (8, 1, 64), (2, 2, 128)])
@pytest.mark.parametrize("windows", [(0, 5), (9, 24)])
def test_families_of_one_step_have_windows_of_their_own(
    windows: tuple[int, int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Wide heads of one group, and groups of eight."""
    families = [step_of([21, 5], [(6, 30)], window, shape, dtype) for window in windows]
    sinks = randn(shape[0], dtype=dtype, seed=8)
    given = [
        (q, layer_kv, fast.prepare(rows, PAGE, q.dtype), SCALE, sinks)
        for q, layer_kv, rows in families
    ]
    outs = [fast.attend(*family) for family in given]
    for family, out in zip(given, outs, strict=True):
        assert_close("attention", out, reference.attend(*family), dtype)
