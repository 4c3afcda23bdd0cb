"""Adapters' shrink and expand in Triton against the naive reference."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, make_site, randn
from tests.unit.pools import HIDDEN, VOCABULARY, adapter, embedding, make_pool, plain_embedding

from manyroots.kernels.launch import counters  # isort: skip
from manyroots.kernels.lora_ops import reference  # isort: skip
from manyroots.kernels.lora_ops import triton as fast  # isort: skip
from manyroots.kernels.lora_ops.sites import LoraTerm, most_blocks, row_blocks  # isort: skip
from manyroots.kernels.lora_ops.sites import block_rows_for  # isort: skip
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
    tiling = fast.ShrinkTiling(num_splits, fast.SHORT_STEP_BYTES, 4)
    hidden = fast.shrink(x, site, rows, tiling=tiling).hidden
    assert hidden.shape[0] == 1
    hidden = hidden[0]
    assert not counters(hidden.device).any()
    expected = reference.shrink(x, site, rows).hidden[0]
    for row, slot in enumerate(rows.slots.tolist()):
        if slot >= 0:
            total = sum(RANKS[slot])
            assert_close("lora", hidden[row, :total], expected[row, :total], dtype)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("rank", [8, 24])
def test_s04_the_distance_of_shrunk_rows_is_aligned(rank: int, num_parts: int) -> None:
    """S04: Triton compiles a kernel again where a number is not a multiple of 16 any more."""
    site = make_site(64, (16,) * num_parts, [(rank,) * num_parts])
    hidden = fast.shrink(randn(7, 64), site, make_rows(*[0] * 7)).hidden
    assert hidden.stride(0) % 16 == hidden.stride(1) % 16 == 0


@pytest.mark.parametrize("num_rows", [65, 600, 2100])
def test_a_shrink_is_cut_by_its_rows_and_gives_one_sum(num_rows: int) -> None:
    """Few rows are cut into parts of the inner dimension; readers still find one sum."""
    site = make_site(64, (16, 8), [(8, 16), (16, 8)])
    rows = make_rows(*[0] * (num_rows - 33), *[1] * 30, *[-1] * 3)
    x = randn(num_rows, 64, seed=3)
    hidden = fast.shrink(x, site, rows).hidden
    assert hidden.shape[:2] == (1, num_rows)
    expected = reference.shrink(x, site, rows).hidden[0]
    assert_close("lora", hidden[0, :-3, :24], expected[:-3, :24], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [(-1, *[0] * 19, 1, 2, 2, -1), (-1, 0, 0, 1, 2, 2, -1) * 9])
def test_expand_adds_each_rows_own_parts_and_leaves_base_rows_alone(
    slots: tuple[int, ...], dtype: torch.dtype
) -> None:
    """In the second case a program has several blocks."""
    site = make_site(64, (32, 200, 16), RANKS, dtype)
    rows = make_rows(*slots, block_rows=64)
    hidden = randn(2, len(rows.slots), site.width, seed=2)
    y = randn(len(rows.slots), 248, dtype=dtype, seed=3)
    expected = y.clone()
    fast.expand(y, LoraTerm(hidden, site, rows))
    before = expected.clone()
    reference.expand(expected, LoraTerm(hidden, site, rows))
    assert_close("lora", y, expected, dtype)
    assert torch.equal(y[0], before[0])
    assert torch.equal(y[-1], before[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "slots",
    [
        (-1, 0, 0, 1, 2, 2, -1), (-1, *[0] * 30, 1, 2, 2, -1), (*[2] * 40, -1, *[0] * 30),
        (-1, 0, 0, 1, 2, 2) * 10,
    ],
)  # fmt: skip
@pytest.mark.parametrize("splits", [1, 3])
def test_partial_sums_are_added_up_with_each_rows_own_parts(
    splits: int, slots: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A program per row, one per block of rows, and one for several blocks; rows of the base
    model, too."""
    site = make_site(64, (32, 200, 16), RANKS, dtype)
    rows = make_rows(*slots, block_rows=block_rows_for(len(slots)))
    hidden = randn(2, len(slots), site.width, seed=2)
    sums = randn(splits, len(slots), 256, seed=3)[..., :248]
    term = LoraTerm(hidden, site, rows)
    out = fast.complete(sums, term)
    expected = sums.sum(0)
    reference.expand(expected, term)
    assert out.dtype == dtype
    assert_close("lora", out, expected.to(dtype), dtype)
    assert_close("lora", reference.complete(sums, term), expected.to(dtype), dtype)
    assert torch.equal(expected[slots.index(-1)], sums.sum(0)[slots.index(-1)])


def test_a_product_of_more_columns_than_programs_is_expanded_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head: each program has many tiles, and an adapter without one changes nothing."""
    monkeypatch.setattr(fast, "WIDE_TILES", 3)
    monkeypatch.setattr(fast, "WIDE_PROGRAMS", 40)
    site = make_site(64, (20 * 128 + 5,), [(8,), (0,), (16,)])
    rows = make_rows(-1, 0, 0, 1, 2)
    y = randn(5, 20 * 128 + 5, seed=3)
    expected, before = y.clone(), y.clone()
    term = reference.shrink(randn(5, 64, seed=4), site, rows)
    fast.expand(y, term)
    reference.expand(expected, term)
    assert_close("lora", y, expected, torch.float32)
    assert torch.equal(y[[0, 3]], before[[0, 3]])
    assert not torch.equal(y[[1, 2, 4]], before[[1, 2, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[0], [-1, 0, 0, 1, 2, 2], [-1] * 3 + [2] * 70 + [1] * 20])
def test_embeddings_equal_the_reference_and_pefts_formula(
    slots: list[int], dtype: torch.dtype
) -> None:
    """Ranks that are no multiple of anything, and an adapter that leaves the embedding alone."""
    ranks = (3, 0, 13)
    adapters = [adapter((4, 0, 0), i, dtype, lookup_rank=r) for i, r in enumerate(ranks)]
    pool = make_pool(adapters, dtype, is_transposed=False, device=DEVICE)
    rows = fast.prepare(torch.tensor(slots).numpy(), pool, DEVICE)
    assert rows is not None
    y = randn(len(slots), HIDDEN, dtype=dtype, seed=5)
    tokens = torch.arange(len(slots), device=DEVICE) * 7 % VOCABULARY
    expected, before = y.clone(), y.clone()
    fast.add_embedding(y, tokens, embedding(pool), rows)
    reference.add_embedding(expected, tokens, embedding(pool), rows)
    assert_close("lora", y, expected, dtype)
    for row, slot in enumerate(slots):
        if slot in (-1, 1):
            assert torch.equal(y[row], before[row])
        else:
            added = plain_embedding(adapters[slot], tokens[row : row + 1].cpu())[0]
            assert_close("lora", y[row].cpu(), before[row].float().cpu() + added, dtype)
            assert not torch.equal(y[row], before[row])


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
    hidden = fast.shrink(x, site, roomy).hidden.sum(0, keepdim=True)[..., :8]
    assert_close("lora", hidden, reference.shrink(x, site, rows).hidden[..., :8], torch.float32)
    assert hidden.device.type == DEVICE.type


def test_a_shrink_of_more_tiles_than_counters_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of thousands of blocks of large ranks has more tiles than there are counters."""
    monkeypatch.setattr(fast, "NUM_COUNTERS", 1)
    site = make_site(64, (16, 8), [(8, 16), (16, 8)])
    rows = make_rows(*[0] * 40, *[1] * 30)
    x = randn(70, 64, seed=3)
    hidden, expected = (ops.shrink(x, site, rows).hidden[0] for ops in (fast, reference))
    assert not counters(hidden.device).any()
    assert_close("lora", hidden[:, :24], expected[:, :24], torch.float32)


def test_rows_are_computed_one_by_one_only_of_one_sum() -> None:
    """Several partial sums of several rows would not fit into registers: with four, an activation
    of 96 rows took ten times as long as with one."""
    short, long = (make_site(64, (16,), [(rank,)]) for rank in (8, 16))
    assert fast.single_rows_of(short, 96, 1) > 1
    for site, num_rows, num_sums in ((short, 96, 4), (short, 600, 1), (long, 96, 1)):
        assert fast.single_rows_of(site, num_rows, num_sums) == 1
