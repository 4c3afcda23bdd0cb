"""The beginning and the end of a step in Triton against the naive reference."""

from __future__ import annotations

import torch

from tests.unit.kernels.triton_cases import DEVICE

from manyroots.kernels.decode_rows import reference  # isort: skip
from manyroots.kernels.decode_rows import triton as fast  # isort: skip


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_rows_are_gathered_and_only_pending_tokens_are_replaced() -> None:
    """Tokens are of token rows, tables of sequences; of two families."""
    newest = torch.arange(100, 106, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    tables = torch.randint(0, 99, (2, 6, 300), dtype=torch.int32, generator=generator).to(DEVICE)
    given = (ints(7, -1, 0, -1, 3), ints(2, 0, 4, 5, 5), newest, tables, ints(2, 0, 4, 5))
    (tokens, pages), (wanted, expected) = fast.begin(*given), reference.begin(*given)
    assert tokens.tolist() == wanted.tolist() == [7, 100, 0, 105, 3]
    assert torch.equal(pages, expected)
    assert pages.shape == (2, 4, 300)


def test_tokens_are_kept_by_row() -> None:
    tokens, rows = ints(9, 8, 7, dtype=torch.int32), ints(4, 1, 5)
    ours, expected = (torch.zeros(6, dtype=torch.int64, device=DEVICE) for _ in range(2))
    fast.end(tokens, rows, ours)
    reference.end(tokens, rows, expected)
    assert ours.tolist() == expected.tolist() == [0, 8, 0, 0, 9, 7]
