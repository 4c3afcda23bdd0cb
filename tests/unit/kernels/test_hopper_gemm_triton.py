"""Products on Hopper GPUs against the naive reference, and which shapes are sent there.

Triton's interpreter can't run that kernel. Where there is no such GPU, the cases run through the
kernel that takes what it does not; `python -m tests.gpu.check kernels:hopper_gemm` is for the GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, randn

from manyroots.kernels.gemm import reference, triton_hopper  # isort: skip
from manyroots.kernels.gemm import triton as gemm  # isort: skip
from manyroots.kernels.gemm.triton_hopper import RingTiling  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

IS_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
DTYPE = torch.bfloat16 if IS_HOPPER else torch.float32
NARROW, THREE = RingTiling(1, 64, 64, 4, 1, 4, 64), RingTiling(3, 64, 64, 3, 2, 4, 96)
MANY = RingTiling(1, 128, 64, 4, 3, 8, 96)
FEW_PROGRAMS = RingTiling(1, 64, 128, 3, 1, 4, 64, 3)
CASES = [(6, 192, 72, NARROW), (64, 200, 200, THREE)]
if IS_HOPPER:
    CASES += [
        (6, 4096, 1000, THREE), (102, 1088, 300, MANY), (241, 640, 400, MANY),
        (21, 520, 640, FEW_PROGRAMS),
    ]  # fmt: skip


def tiled(tiling: RingTiling) -> RingTiling | gemm.Tiling:
    """On a GPU; elsewhere the other kernel's with as many splits."""
    return tiling if IS_HOPPER else gemm.Tiling(32, 64, tiling.num_splits, 2, 4)


@pytest.mark.parametrize(("num_rows", "k_size", "n_size", "tiling"), CASES)
def test_products_with_weights_that_come_early_equal_the_reference(
    num_rows: int, k_size: int, n_size: int, tiling: RingTiling
) -> None:
    """NaN follows the rows. Each product follows a kernel that writes its rows, so that weights are
    asked for before the rows are there."""
    behind = torch.full((num_rows + 1, k_size), float("nan"), dtype=DTYPE, device=DEVICE)
    weight = randn(n_size, k_size, dtype=DTYPE, seed=4) * k_size**-0.5
    bias = randn(n_size, dtype=DTYPE, seed=5) if tiling is not THREE else None
    behind[:-1] = randn(num_rows, k_size, dtype=DTYPE)
    x = behind[:-1]
    out, _ = gemm.linear(x, weight, None, None, bias, tiling=tiled(tiling))
    expected, _ = reference.linear(x, weight, None, None, bias)
    assert out.shape == (tiling.num_splits, num_rows, n_size)
    assert_close("lora", out.float().sum(0), expected[0], DTYPE)


def test_which_products_are_sent_to_the_kernel_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_hopper, "is_hopper", lambda device: True)

    def sent(
        num_rows: int, n_size: int, k_size: int = 4096, *,
        of_rows: torch.dtype = torch.bfloat16, of_weight: torch.dtype = torch.bfloat16,
        step: int = 1,
    ) -> RingTiling | None:  # fmt: skip
        x = torch.empty(num_rows, k_size * step, dtype=of_rows, device="meta")[:, ::step]
        weight = torch.empty(n_size, k_size, dtype=of_weight, device="meta")
        return triton_hopper.tiling_for(x, weight)

    assert sent(64, 4096) == RingTiling(1, 64, 128, 7, 2, 4, 64)
    assert sent(64, 6144) == RingTiling(1, 64, 128, 7, 1, 4, 64)
    assert sent(64, 24_576) == RingTiling(3, 64, 128, 3, 1, 4, 88)
    assert sent(64, 151_936) == RingTiling(3, 64, 128, 3, 1, 4, 88, 132)
    assert sent(8, 4096) == RingTiling(1, 64, 128, 11, 2, 4, 48)
    assert sent(8, 24_576) == RingTiling(3, 64, 128, 4, 1, 4, 56)
    assert sent(8, 6144) is None
    assert sent(32, 4096) is None
    assert sent(65, 4096) is None
    assert sent(64, 5120) is None
    assert sent(64, 4096, 4100) is None
    assert sent(64, 4096, 512) is None
    assert sent(64, 4096, of_rows=torch.float16) is None
    assert sent(64, 4096, of_weight=torch.float32) is None
    assert sent(64, 4096, step=2) is None
