"""Memory that nobody has written is not zero: kernels' tests see NaN and the largest number in it.

What a process gets from the system is zeros, and what it gave back a moment ago is often the right
result, so that a kernel which leaves something out, or reads what nobody wrote, passes by chance.
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
