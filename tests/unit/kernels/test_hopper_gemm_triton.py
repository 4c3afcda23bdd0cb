"""Products on Hopper GPUs against the naive reference, and which shapes are sent there.

Triton's interpreter can't run that kernel. Where there is no such GPU, the cases run through the
kernel that takes what it does not; `python -m tests.gpu.check kernels:hopper_gemm` is for the GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, randn

from manyroots.kernels.gemm import hopper_tilings, reference  # isort: skip
from manyroots.kernels.gemm import triton as gemm  # isort: skip
from manyroots.kernels.gemm.hopper_tilings import RingTiling  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

IS_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
DTYPE = torch.bfloat16 if IS_HOPPER else torch.float32
NARROW, THREE = RingTiling(1, 64, 2, 2, 4), RingTiling(3, 64, 2, 1, 3)
WIDE = RingTiling(1, 128, 9, 3, 2, 8)
CASES = [(6, 192, 72, NARROW), (64, 200, 200, THREE)]
if IS_HOPPER:
    CASES += [
        (6, 4096, 1000, RingTiling(3, 64, 32, 16, 3)), (102, 1088, 300, WIDE),
        (241, 1144, 400, WIDE), (21, 520, 640, RingTiling(1, 64, 5, 15, 3)),
        (64, 2048, 640, RingTiling(1, 64, 16, 12, 5)), (50, 520, 640, RingTiling(1, 64, 6, 3, 3)),
    ]  # fmt: skip
"""A tile each; two splits of tiles of three pieces; three splits, with eight warps; three tiles
each; equal shares, of two tiles; and a block too many, so that shares are alike."""


def tiled(tiling: RingTiling) -> RingTiling | gemm.Tiling:
    """On a GPU; elsewhere the other kernel's with as many splits."""
    return tiling if IS_HOPPER else gemm.Tiling(32, 64, tiling.num_splits, 2, 4)


@pytest.mark.parametrize(("num_rows", "k_size", "n_size", "tiling"), CASES)
def test_products_with_weights_that_come_early_equal_the_reference(
    num_rows: int, k_size: int, n_size: int, tiling: RingTiling
) -> None:
    """Behind the rows lies NaN. Each product follows a kernel that writes its rows, so that weights
    are asked for before those are there."""
    behind = torch.full((num_rows + 1, k_size), float("nan"), dtype=DTYPE, device=DEVICE)
    weight = randn(n_size, k_size, dtype=DTYPE, seed=4) * k_size**-0.5
    bias = randn(n_size, dtype=DTYPE, seed=5) if tiling.pieces == 1 else None
    behind[:-1] = randn(num_rows, k_size, dtype=DTYPE)
    x = behind[:-1]
    out, _ = gemm.linear(x, weight, None, None, bias, tiling=tiled(tiling))
    expected, _ = reference.linear(x, weight, None, None, bias)
    assert out.shape == (tiling.num_splits, num_rows, n_size)
    assert_close("lora", out.float().sum(0), expected[0], DTYPE)


def test_which_products_are_sent_to_the_kernel_for_hopper() -> None:
    def sent(
        num_rows: int, n_size: int, k_size: int = 4096, *,
        of_rows: torch.dtype = torch.bfloat16, of_weight: torch.dtype = torch.bfloat16,
        step: int = 1,
    ) -> RingTiling | None:  # fmt: skip
        x = torch.empty(num_rows, k_size * step, dtype=of_rows, device="meta")[:, ::step]
        weight = torch.empty(n_size, k_size, dtype=of_weight, device="meta")
        return hopper_tilings.tiling_for(x, weight, on_hopper=True)

    assert sent(64, 4096) == RingTiling(1, 64, 32, 16, 6)
    assert sent(64, 6144) == RingTiling(1, 64, 32, 24, 6)
    assert sent(64, 8192) == RingTiling(1, 64, 32, 32, 6)
    assert sent(64, 24_576) == RingTiling(3, 64, 32, 32, 3)
    assert sent(64, 151_936) == RingTiling(3, 64, 32, 192, 3)
    assert sent(8, 4096) == RingTiling(1, 64, 32, 16, 11)
    assert sent(8, 4096, 4136) == RingTiling(1, 64, 34, 17, 11)
    assert sent(8, 24_576) == RingTiling(3, 64, 32, 32, 4)
    assert sent(8, 6144) is None
    assert sent(32, 4096) is None
    assert sent(65, 4096) is None
    assert sent(64, 5120) is None
    assert sent(64, 4096, 4100) is None
    assert sent(64, 4096, 512) is None
    assert sent(64, 4096, of_rows=torch.float16) is None
    assert sent(64, 4096, of_weight=torch.float32) is None
    assert sent(64, 4096, step=2) is None


@pytest.mark.parametrize("num_rows", [8, 64])
@pytest.mark.parametrize("k_size", [1536, 2816, 4096, 4136, 12_288])
@pytest.mark.parametrize("n_size", [4096, 6144, 6272, 8192, 24_576, 128_256, 151_936])
def test_programs_have_every_block_once_and_every_tile_is_in_as_many_parts(
    num_rows: int, n_size: int, k_size: int
) -> None:
    """A part that nobody writes would be added up all the same."""
    x = torch.empty(num_rows, k_size, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(n_size, k_size, dtype=torch.bfloat16, device="meta")
    tiling = hopper_tilings.tiling_for(x, weight, on_hopper=True)
    if tiling is None:
        return
    num_tiles = -(-n_size // tiling.tile)
    parts: dict[int, set[int]] = {tile: set() for tile in range(num_tiles)}
    for at in range(num_tiles * tiling.num_blocks):
        parts[at // tiling.num_blocks].add(at // tiling.share)
    assert {len(programs) for programs in parts.values()} == {tiling.num_splits}
    assert 0 <= tiling.num_blocks * hopper_tilings.BLOCK_K - k_size < 2 * hopper_tilings.BLOCK_K
