"""Paged attention of decodes and of prompts in Triton against the naive reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernels.paged_cases import PAGE, SCALE, pages_for
from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from manyroots.kernels.attention import reference  # isort: skip
from manyroots.kernels.attention import triton as fast  # isort: skip
from manyroots.kernels.attention.paged import (  # isort: skip
    DecodeRows,
    PrefillSegments,
    SharedPrefixes,
    query_blocks,
)
from manyroots.kernels.attention.sharing import PrefixGroup, shared_arrays  # isort: skip
from manyroots.kernels.attention.triton_prefill import PrefillTiling  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip


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
