"""The beginning and the end of a decode step in Triton against the naive reference."""

from __future__ import annotations

import torch

from tests.unit.kernels.triton_cases import DEVICE, randn

from manyroots.kernels.decode_rows import reference  # isort: skip
from manyroots.kernels.decode_rows import triton as fast  # isort: skip
from manyroots.kernels.rope_write.inputs import RopeTable  # isort: skip


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_rows_are_gathered_and_only_pending_tokens_are_replaced() -> None:
    newest = torch.arange(100, 106, device=DEVICE)
    torch.manual_seed(0)
    tables = torch.randint(0, 99, (2, 6, 300), dtype=torch.int32, device=DEVICE)
    ropes = (
        RopeTable(randn(50, 16), randn(50, 16, seed=1)),
        RopeTable(randn(50, 12, seed=2), randn(50, 12, seed=3)),
    )
    given = (ints(7, -1, 0, -1), ints(2, 0, 4, 5), ints(3, 49, 0, 8), newest, tables, ropes)
    ours, expected = fast.begin(*given), reference.begin(*given)
    assert ours.tokens.tolist() == expected.tokens.tolist() == [7, 100, 0, 105]
    assert torch.equal(ours.page_tables, expected.page_tables)
    for mine, theirs in zip(ours.ropes, expected.ropes, strict=True):
        assert torch.equal(mine.cos, theirs.cos)
        assert torch.equal(mine.sin, theirs.sin)


def test_tokens_are_kept_by_row_and_given_with_their_faults() -> None:
    tokens, rows = ints(9, 8, 7, dtype=torch.int32), ints(4, 1, 5)
    finite = torch.tensor([True, False, True], device=DEVICE)
    ours, expected = (torch.zeros(6, dtype=torch.int64, device=DEVICE) for _ in range(2))
    assert torch.equal(
        fast.end(tokens, finite, rows, ours), reference.end(tokens, finite, rows, expected)
    )
    assert ours.tolist() == expected.tolist() == [0, 8, 0, 0, 9, 7]
