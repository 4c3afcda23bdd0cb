"""Q01: products in FP8 whose weights come before their rows, against the naive reference, and which
products those are.

Triton's interpreter can't run that kernel. Where there is no Hopper GPU, the cases run through the
kernel that takes what it does not; `python -m tests.gpu.check kernels:early` is for the GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, randn

from manyroots.kernels.fp8_rows import Fp8Form  # isort: skip
from manyroots.kernels.gemm import reference  # isort: skip
from manyroots.kernels.gemm import triton as gemm  # isort: skip
from manyroots.kernels.gemm import triton_early as early  # isort: skip
from manyroots.kernels.gemm.triton_early import EarlyTiling  # isort: skip
from manyroots.kernels.scaled import ScaledMatrix, quantize_rows  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip
from manyroots.kernels.triton_fp8_rows import in_fp8  # isort: skip

IS_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
DTYPE = torch.bfloat16 if IS_HOPPER else torch.float32
CASES = [(3, 72, 256, None), (9, 64, 512, 256)]
if IS_HOPPER:
    CASES += [
        (8, 4096, 4096, None), (8, 6144, 4096, None), (5, 4096, 12288, 256),
        (16, 17000, 1024, None), (33, 200, 512, None), (64, 4160, 12288, None),
        (64, 20000, 512, None), (17, 6144, 2048, None),
    ]  # fmt: skip


def matrix(n: int, k: int) -> ScaledMatrix:
    return ScaledMatrix(*quantize_rows(randn(n, k, seed=4) * k**-0.5), k)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(("num_rows", "n_size", "k_size", "group"), CASES)
def test_q01_products_with_weights_that_come_early_equal_the_reference(
    num_rows: int, n_size: int, k_size: int, group: int | None, is_plain: bool
) -> None:
    """NaN follows the rows. Each product follows a kernel that writes its rows, so that weights are
    asked for before the rows are there."""
    behind = torch.full((num_rows + 1, k_size), float("nan"), dtype=DTYPE, device=DEVICE)
    behind[:-1] = randn(num_rows, k_size, dtype=DTYPE)
    x, weight = behind[:-1], matrix(n_size, k_size)
    given = x if is_plain else in_fp8(x, Fp8Form(2, group or k_size, False))
    expected, _ = reference.linear(x, weight)
    out, _ = gemm.linear(given, weight)
    assert_close("scaled", out.float().sum(0).to(DTYPE), expected[0].to(DTYPE), DTYPE)
    if IS_HOPPER:
        assert early.tiling_for(given, weight) is not None


def test_q01_which_products_have_weights_that_come_early() -> None:
    """Q01: those of up to 64 rows in bfloat16 with a scale for each row of the weight; every split
    has as many blocks of the inner dimension, and two at least."""
    x = torch.zeros(8, 4096, dtype=torch.bfloat16)
    weight = matrix(64, 4096)
    assert early.tiling_for(x, weight, on_hopper=True) == EarlyTiling(64, 4, 6)
    assert early.tiling_for(x, weight, on_hopper=False) is None
    assert early.tiling_for(x.float(), weight, on_hopper=True) is None
    assert early.tiling_for(x.repeat(9, 1), weight, on_hopper=True) is None
    blocks = ScaledMatrix(weight.data, weight.scales.expand(-1, 32), 128)
    assert early.tiling_for(x, blocks, on_hopper=True) is None
    for k_size, splits in ((640, 1), (512, 2), (128, None), (4160, None)):
        narrow = early.tiling_for(x[:, :1].expand(8, k_size), matrix(64, k_size), on_hopper=True)
        assert (None if narrow is None else narrow.num_splits) == splits
    few = early.tiling_for(x, weight, on_hopper=True)
    assert few is not None
    assert early.takes_plain(x, few)
    assert not early.takes_plain(x.repeat(3, 1), few)
    assert not early.takes_plain(x.repeat(1, 3), few)
