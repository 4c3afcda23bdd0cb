"""Unwritten memory is not zero: kernels' tests see NaN and the largest number in it.

The system gives a process zeros, and memory that was freed a moment ago often holds the right
result. A kernel that leaves something out, or reads unwritten memory, would pass by chance.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_is_filled() -> Iterator[None]:
    assert torch.utils.deterministic.fill_uninitialized_memory, "torch's own default"
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
