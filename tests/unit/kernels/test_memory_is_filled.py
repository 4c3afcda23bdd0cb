"""What `conftest.py` promises of unwritten memory holds in these tests."""

from __future__ import annotations

import torch


def test_memory_that_nobody_has_written_is_not_zero() -> None:
    assert torch.isnan(torch.empty(3)).all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
