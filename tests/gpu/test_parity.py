"""Outputs on the GPU equal those of the CPU, with graphs and without, launched early or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import launches, models, parity

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: parity not checked")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", models.KINDS)
def test_the_gpu_gives_the_cpus_outputs(tmp_path: Path, kind: str, dtype: str) -> None:
    """W19: replayed graphs and single launches, base and adapters, beside the CPU's engine."""
    parity.check(tmp_path, kind, dtype)


@pytest.mark.parametrize("kind", launches.KINDS)
def test_kernels_that_begin_early_give_the_same_bits(tmp_path: Path, kind: str) -> None:
    launches.check(tmp_path, kind, "bfloat16")
