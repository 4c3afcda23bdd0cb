"""A quarter of the decide half's faults, in a file of its own for a test process of its own."""

from __future__ import annotations

import pytest

from tests.property.detecting import detect_slice


@pytest.mark.slow
def test_every_fault_of_the_decide_half_is_noticed() -> None:
    detect_slice(__file__)
