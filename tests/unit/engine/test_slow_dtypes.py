"""A dtype that the CPU is slow at is served, with a warning that names the remedy."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from manyroots.config import ModelSettings
from manyroots.engine import worker
from tests.unit.models.tiny import tiny_source

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_dtype_without_instructions_is_warned_of(
    has_instructions: bool,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(worker, "has_products_of", lambda _: has_instructions)
    with caplog.at_level(logging.WARNING):
        picked = worker.pick_dtype(ModelSettings(dtype=dtype), tiny_source(), CPU)
    assert picked is getattr(torch, dtype)
    assert ("leave --dtype out" in caplog.text) != has_instructions


def test_auto_is_float32_on_a_cpu_and_every_cpu_has_its_products(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert worker.pick_dtype(ModelSettings(), tiny_source(), CPU) is torch.float32
    assert worker.has_products_of(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert worker.has_products_of(dtype) in (True, False)
    assert caplog.text == ""


def test_where_a_cpu_says_what_it_has_torch_agrees() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or torch.backends.mkldnn.is_available() is False:
        pytest.skip("nothing to compare with")
    flags = set(cpuinfo.read_text().split())
    if not flags & {"bf16", "avx512_bf16", "amx_bf16", "avx512bw"}:
        assert not worker.has_products_of(torch.bfloat16)
