"""Outputs on the GPU equal those of the CPU, with graphs and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.parity import KINDS, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: parity not checked")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gpu_gives_the_cpus_outputs(tmp_path: Path, kind: str, dtype: str) -> None:
    """W19: replayed graphs and single launches, base and adapters, beside the CPU's engine."""
    check(tmp_path, kind, dtype)
