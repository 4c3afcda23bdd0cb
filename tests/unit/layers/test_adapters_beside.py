"""All slots' A behind a weight's rows: one product gives what the product and shrink give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyroots.distributed.shard import WHOLE
from manyroots.ids import AdapterSlot
from manyroots.kernels.choice import reference_kernels
from manyroots.kernels.lora_sites.sites import LoraRows
from manyroots.layers import linear as linear_module
from manyroots.layers.linear import Linear
from manyroots.store.adapter_pool import AdapterPool
from tests.unit.pools import CPU, HIDDEN, OUTS, adapter

REFERENCE = reference_kernels()
KERNELS: Any = SimpleNamespace(
    lora_sites=REFERENCE.lora_sites,
    scaled_gemm=REFERENCE.scaled_gemm,
    gemm=SimpleNamespace(
        is_for=lambda num_rows, *_, **__: num_rows <= MOST, linear=REFERENCE.gemm.linear
    ),
)
SLOTS = (-1, 0, 0, 1, 1, 1, -1, 0)
MOST = 3
"""Rows that the kernel set multiplies itself."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up products are small beside their adapters."""
    monkeypatch.setattr(linear_module, "BESIDE_SHARE", 0.1)
    monkeypatch.setattr(linear_module, "MOST_BESIDE", 4)
    monkeypatch.setattr(linear_module, "LEAST_BESIDE", len(SLOTS))


def made(*, bias: bool = False, num_slots: int = 2) -> tuple[Linear, AdapterPool]:
    parts = dict(zip("qkv", OUTS, strict=True))
    linear = Linear(
        HIDDEN, parts, bias=bias, side=None, shard=WHOLE,
        dtype=torch.float32, device=CPU, kernels=KERNELS,
    )  # fmt: skip
    torch.manual_seed(1)
    linear.weight.data = torch.randn(sum(OUTS), HIDDEN)
    if linear.bias is not None:
        linear.bias.normal_()
    pool = AdapterPool(
        dict(linear.site.targets("attn")),
        num_slots=num_slots, max_rank=16, dtype=torch.float32, device=CPU, is_turned=False,
    )  # fmt: skip
    linear.pooled = pool.sites[linear.site]
    return linear, pool


def given(linear: Linear, num_rows: int = len(SLOTS)) -> tuple[torch.Tensor, int]:
    """What a product gives with its adapters, and how far one slot's sums are from the next's."""
    torch.manual_seed(2)
    x = torch.randn(num_rows, HIDDEN)
    step: Any = SimpleNamespace(lora=LoraRows.build(SLOTS[:num_rows], CPU))
    product = linear(x, step)
    assert product.lora is not None
    return product.finished(KERNELS).clone(), product.lora.slot_columns


def test_a_product_with_all_slots_gives_the_same_through_every_load() -> None:
    linear, pool = made()
    wide, wide_pool = made()
    wide.make_room_beside(2, 16)
    assert wide.beside is not None
    assert wide.pooled is not None
    wide_pool.keep_beside(wide.pooled, wide.beside)
    loads = [(0, (8, 4, 16)), (1, (3, 0, 16)), (0, (0, 8, 0)), (1, (16, 16, 16))]
    for seed, (slot, ranks) in enumerate(loads):
        for of in (pool, wide_pool):
            of.load(AdapterSlot(slot), adapter(ranks, seed, lookup_rank=0))
        for num_rows in (len(SLOTS), 4, 3):
            (expected, of_own), (got, of_slots) = given(linear, num_rows), given(wide, num_rows)
            assert (of_own, of_slots) == (0, 48)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert given(wide, len(SLOTS) - 1)[1] == 0, "a kernel with each block's own A is as fast"
    torch.manual_seed(3)
    x = torch.randn(9, HIDDEN)
    step: Any = SimpleNamespace(lora=None)
    torch.testing.assert_close(wide(x, step).sums, linear(x, step).sums)


def test_weights_are_filled_again_where_they_lie_then() -> None:
    linear, pool = made()
    linear.make_room_beside(2, 16)
    assert linear.beside is not None
    assert linear.pooled is not None
    pool.keep_beside(linear.pooled, linear.beside)
    pool.load(AdapterSlot(0), adapter((8, 8, 8), 3, lookup_rank=0))
    before, _ = given(linear)
    assert isinstance(linear.weight.data, torch.Tensor)
    linear.weight.data.mul_(2.0)
    after, _ = given(linear)
    torch.manual_seed(2)
    x = torch.randn(len(SLOTS), HIDDEN)
    torch.testing.assert_close(after - before, x @ linear.weight.data.T / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bias", "num_slots", "share", "numbers"),
    [
        (True, 2, 0.1, 10**6), (False, 2, 10, 10**6), (False, 0, 0.1, 10**6),
        (False, 2, 0.1, 96 * HIDDEN - 1),
    ],
)  # fmt: skip
def test_where_it_is_not_worth_it_nothing_is_laid_beside(
    bias: bool, num_slots: int, share: float, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "BESIDE_SHARE", share)
    monkeypatch.setattr(linear_module, "BESIDE_NUMBERS", numbers)
    linear, _ = made(bias=bias)
    linear.make_room_beside(num_slots, 16)
    assert linear.beside is None
    assert linear.weight.data.shape[0] == sum(OUTS)


def test_few_rows_do_not_take_them_where_a_tile_more_would_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight of one tile, and with all slots' A of four."""
    monkeypatch.setattr(linear_module, "TILE_ROWS", sum(OUTS))
    for at_once, of_few in ((2, 0), (8, 48)):
        monkeypatch.setattr(linear_module, "AT_ONCE", at_once)
        linear, pool = made()
        linear.make_room_beside(2, 16)
        assert linear.beside is not None
        assert linear.pooled is not None
        pool.keep_beside(linear.pooled, linear.beside)
        pool.load(AdapterSlot(0), adapter((8, 8, 8), 3, lookup_rank=0))
        assert given(linear, 4)[1] == of_few
        assert given(linear)[1] == 48
