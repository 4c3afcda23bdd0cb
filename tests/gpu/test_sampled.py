"""The comparison of sampled steps where there is no GPU: its runner, with references as kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import sampled
from tests.gpu.engines import Side

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_steps")]


def test_each_parameter_is_sampled_as_on_the_cpu(tmp_path: Path) -> None:
    assert "requests have the CPU's tokens" in sampled.check(
        tmp_path, "llama", "float32", Side.REFERENCES, count=3
    )
