"""Attention of tokens that follow each other in one sequence, against the naive reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernels.paged_cases import PAGE, SCALE, pages_for
from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from manyroots.kernels.attention import reference  # isort: skip
from manyroots.kernels.attention import triton as fast  # isort: skip
from manyroots.kernels.attention.paged import (  # isort: skip
    MAX_RUN,
    AttentionMetadata,
    DecodeRows,
    TokenRuns,
    token_runs,
)
from manyroots.kernels.attention.triton_runs import RunTiling, decode_runs  # isort: skip
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

FP8 = torch.float8_e4m3fn
NUM_TOKENS, LENS = [5, 1, 3, 8, 2], [70, 1, 3, 65, 33]
"""Of each sequence: its tokens in this step, and all tokens that the last of them sees."""


def rows_of(
    num_tokens: list[int], lens: list[int], kv_heads: int, dim: int, num_padding: int = 0
) -> tuple[torch.Tensor, DecodeRows]:
    """Pages and rows; the last row is repeated so often."""
    layer_kv, table = pages_for(lens, kv_heads, dim, torch.float32)
    seqs = np.repeat(np.arange(len(lens)), num_tokens)
    ends = [
        np.arange(length - count, length) + 1
        for count, length in zip(num_tokens, lens, strict=True)
    ]
    context = np.concatenate(ends).astype(np.int32)
    seqs = np.append(seqs, np.full(num_padding, seqs[-1]))
    context = np.append(context, np.full(num_padding, context[-1])).astype(np.int32)
    starts, count = token_runs(seqs, context)
    runs = TokenRuns(
        torch.from_numpy(starts).to(DEVICE),
        torch.tensor([count], dtype=torch.int32, device=DEVICE),
    )
    lens_there = torch.from_numpy(context).to(DEVICE)
    return layer_kv, DecodeRows(table[torch.from_numpy(seqs)], lens_there, runs=runs)


def test_a_run_ends_with_its_sequence_or_at_its_limit() -> None:
    rows = np.array([4] * 3 + [2] + [7] * (MAX_RUN + 1) + [4, 4], np.int32)
    lens = np.array([9, 10, 11, 5, *range(3, 4 + MAX_RUN), 12, 12], np.int32)
    starts, count = token_runs(rows, lens)
    assert len(starts) == len(rows) + 1
    assert starts[: count + 1].tolist() == [0, 3, 4, 4 + MAX_RUN, 5 + MAX_RUN, len(rows)]


def test_tokens_of_a_sequence_in_another_order_are_no_run() -> None:
    starts, count = token_runs(np.array([1, 1, 1]), np.array([5, 4, 6]))
    assert starts[: count + 1].tolist() == [0, 1, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("parts", "num_programs", "window", "has_sinks", "cap", "heads", "kv_heads", "dim"),
    [
        (1, 1, 0, False, 0.0, 4, 1, 32),
        (1, 1, 9, True, 0.0, 6, 2, 16),
        (4, 64, 0, False, 0.0, 4, 1, 32),
        (4, 64, 0, True, 5.0, 6, 2, 16),
        (4, 64, 9, True, 0.0, 4, 4, 16),
        (16, 264, 20, False, 0.0, 16, 1, 16),
        (2, 264, 0, True, 0.0, 16, 1, 16),
    ],
)
def test_a_run_gives_each_token_what_it_sees_and_nothing_else(
    parts: int,
    num_programs: int,
    window: int,
    has_sinks: bool,
    cap: float,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    layer_kv, rows = rows_of(NUM_TOKENS, LENS, kv_heads, dim, num_padding=3)
    layer_kv = layer_kv.to(dtype)
    q = randn(len(rows.context_lens), heads, dim, dtype=dtype)
    sinks = randn(heads, seed=8) if has_sinks else None
    tiling = RunTiling(16, num_warps=4, num_stages=2, num_programs=num_programs, parts=parts)
    expected = reference.decode_attention(
        q, layer_kv, rows, SCALE, window=window, sinks=sinks, cap=cap
    )
    for _ in range(2):  # the counters must be as they were
        out = decode_runs(
            q, layer_kv, rows, SCALE, window=window, sinks=sinks, cap=cap, tiling=tiling
        )
        assert_close("attention", out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_q04_runs_read_fp8(dtype: torch.dtype) -> None:
    layer_kv, rows = rows_of(NUM_TOKENS, LENS, 2, 32)
    layer_kv = layer_kv.to(FP8)
    q = randn(len(rows.context_lens), 4, 32, dtype=dtype)
    out = decode_runs(q, layer_kv, rows, SCALE)
    assert out.dtype is dtype
    expected = reference.decode_attention(q, layer_kv, rows, SCALE)
    assert_close("attention", out, expected, dtype)


def test_a_step_with_runs_is_attended_to_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_kv, rows = rows_of(NUM_TOKENS, LENS, 2, 16)
    nowhere = torch.zeros(len(rows.context_lens), dtype=torch.int32, device=DEVICE)
    metadata = AttentionMetadata(
        rows.page_table, rows.context_lens, len(rows.context_lens), None, None,
        SlotMapping(nowhere, nowhere), runs=rows.runs,
    )  # fmt: skip
    q = randn(len(rows.context_lens), 4, 16)
    monkeypatch.setattr(fast, "decode_attention", None)
    out = fast.attend(q, layer_kv, fast.prepare(metadata, PAGE, torch.float32), SCALE)
    prepared = reference.prepare(metadata, PAGE, torch.float32)
    assert_close("attention", out, reference.attend(q, layer_kv, prepared, SCALE), torch.float32)


def test_a_run_reads_through_its_first_rows_table() -> None:
    """So that a row's history is read once; the reference does the same."""
    layer_kv, rows = rows_of(NUM_TOKENS, LENS, 2, 16)
    q = randn(len(rows.context_lens), 4, 16)
    expected = reference.decode_attention(q, layer_kv, rows, SCALE)
    others = rows.page_table.clone()
    others[1:5] = others[6]  # all but the first row of the first run
    rows = DecodeRows(others, rows.context_lens, runs=rows.runs)
    for attend in (reference.decode_attention, decode_runs):
        assert_close("attention", attend(q, layer_kv, rows, SCALE), expected, torch.float32)
