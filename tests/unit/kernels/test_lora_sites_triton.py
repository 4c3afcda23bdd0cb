"""Adapters' shrink and expand in Triton against the naive reference."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, make_site, randn

from manyroots.kernels.lora_sites import reference  # isort: skip
from manyroots.kernels.lora_sites import triton as fast  # isort: skip
from manyroots.kernels.lora_sites.sites import LoraTerm, most_blocks, row_blocks  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

RANKS = [(8, 16, 24), (0, 8, 0), (40, 8, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_shrink_is_each_rows_own_product_and_nothing_else(
    dtype: torch.dtype, num_splits: int
) -> None:
    site = make_site(192, (32, 16, 16), RANKS, dtype)
    rows = make_rows(-1, -1, 0, 0, 0, 1, 2, 2)
    x = randn(8, 192, dtype=dtype, seed=1)
    hidden = fast.shrink(x, site, rows, num_splits=num_splits).hidden.sum(0)
    expected = reference.shrink(x, site, rows).hidden[0]
    for row, slot in enumerate(rows.slots.tolist()):
        if slot >= 0:
            total = sum(RANKS[slot])
            assert_close("lora", hidden[row, :total], expected[row, :total], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expand_adds_each_rows_own_parts_and_leaves_base_rows_alone(dtype: torch.dtype) -> None:
    site = make_site(64, (32, 200, 16), RANKS, dtype)
    rows = make_rows(-1, *[0] * 19, 1, 2, 2, -1, block_rows=64)
    hidden = randn(2, len(rows.slots), site.width, seed=2)
    y = randn(len(rows.slots), 248, dtype=dtype, seed=3)
    expected = y.clone()
    fast.expand(y, LoraTerm(hidden, site, rows))
    before = expected.clone()
    reference.expand(expected, LoraTerm(hidden, site, rows))
    assert_close("lora", y, expected, dtype)
    assert torch.equal(y[0], before[0])
    assert torch.equal(y[-1], before[-1])


@pytest.mark.parametrize("block_rows", [1, 16, 64])
def test_blocks_cover_every_row_once_and_never_mix_slots(block_rows: int) -> None:
    slots = torch.tensor([-1] * 3 + [4] * 69 + [2], dtype=torch.int32).numpy()
    blocks = row_blocks(slots, block_rows)
    assert len(blocks) <= most_blocks(len(slots), 2, block_rows)
    covered = [row for first, count, _ in blocks for row in range(first, first + count)]
    assert covered == list(range(len(slots)))
    for first, count, slot in blocks:
        assert count <= block_rows
        assert (slots[first : first + count] == slot).all()


def test_a_graph_with_room_for_more_blocks_ignores_the_empty_ones() -> None:
    site = make_site(64, (16,), [(8,)])
    rows = make_rows(0, 0)
    roomy = type(rows)(
        rows.slots, torch.cat([rows.blocks, rows.blocks.new_zeros(3, 3)]), rows.num_blocks, 4
    )
    x = randn(2, 64)
    hidden = fast.shrink(x, site, roomy).hidden
    assert_close("lora", hidden, reference.shrink(x, site, rows).hidden, torch.float32)
    assert hidden.device.type == DEVICE.type
