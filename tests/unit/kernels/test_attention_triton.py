"""Paged attention in Triton against the naive reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from manyroots.kernels.attention import reference  # isort: skip
from manyroots.kernels.attention import triton as fast  # isort: skip
from manyroots.kernels.attention.paged import DecodeRows, PrefillSegments  # isort: skip
from manyroots.kernels.attention.triton_prefill import PrefillTiling  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

SCALE = 0.3
PAGE = 4


def pages_for(
    lens: list[int], kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One layer's view of an arena, NaN wherever no sequence's token lies; and page tables."""
    counts = [-(-length // PAGE) for length in lens]
    arena = torch.full((sum(counts) + 2, 2, 2, PAGE, kv_heads, dim), float("nan"), dtype=dtype)
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3))
    table = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32)
    used = 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        for token in range(length):
            arena[int(table[row, token // PAGE]), 1, :, token % PAGE] = randn(
                2, kv_heads, dim, seed=1000 * row + token
            ).to("cpu", dtype)
    return arena.to(DEVICE)[:, 1], table.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 32), (6, 2, 16)])
@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (9, True)])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("few", [0, fast.FEW_PROGRAMS], ids=["many programs", "few"])
def test_decode_reads_what_a_row_sees_and_nothing_else(
    few: int,
    splits: int,
    window: int,
    has_sinks: bool,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast, "FEW_PROGRAMS", few)
    lens = [1, 16, 17, 70, 33, 64]
    layer_kv, table = pages_for(lens, kv_heads, dim, dtype)
    rows = DecodeRows(table, torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    q = randn(len(lens), heads, dim, dtype=dtype)
    sinks = randn(heads, seed=8) if has_sinks else None
    for _ in range(2):  # the counters must be as they were
        out = fast.decode_attention(
            q, layer_kv, rows, SCALE, window=window, sinks=sinks, splits=splits, block_t=16
        )
        expected = reference.decode_attention(q, layer_kv, rows, SCALE, window=window, sinks=sinks)
        assert_close("attention", out, expected, dtype)


SEGMENTS = [[(5, 5), (1, 30), (20, 45)], [(150, 160)], [(130, 200), (70, 70)]]
TILINGS = [
    PrefillTiling(queries=128, tokens=16, num_warps=4),
    PrefillTiling(queries=64, tokens=32, num_warps=8, heads=2),
    None,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (7, True), (100, False)])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_prefill_is_causal_over_a_paged_prefix(
    segments: list[tuple[int, int]],
    window: int,
    has_sinks: bool,
    tiling: PrefillTiling | None,
    dtype: torch.dtype,
) -> None:
    """Tiles that are masked and tiles that are not, before and behind a window's edge; heads of
    one program have the same keys."""
    heads, kv_heads, dim = 6, 3, 16
    lens = [context for _, context in segments]
    layer_kv, table = pages_for(lens, kv_heads, dim, dtype)
    starts = [0]
    for num_queries, _ in segments:
        starts.append(starts[-1] + num_queries)
    batch = PrefillSegments.build(table, starts, lens, DEVICE)
    q = randn(starts[-1], heads, dim, dtype=dtype)
    sinks = randn(heads, seed=8) if has_sinks else None
    out = fast.prefill_attention(
        q, layer_kv, batch, SCALE, window=window, sinks=sinks, tiling=tiling
    )
    expected = reference.prefill_attention(q, layer_kv, batch, SCALE, window=window, sinks=sinks)
    assert_close("attention", out, expected, dtype)
