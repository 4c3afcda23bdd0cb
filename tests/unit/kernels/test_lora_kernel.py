"""The torch set's adapters against the naive ones and PEFT's formula, however runs are computed."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.lora_ops import reference, torch_ops
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.lora_ops.stacks import NUM_REMEMBERED, Stacks
from manyroots.kernels.tolerances import assert_close
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_weights import AdapterWeights
from tests.unit.pools import (
    CPU,
    HIDDEN,
    OTHER,
    OUTS,
    VOCABULARY,
    adapter,
    embedding,
    make_pool,
    plain_embedding,
    plain_linear,
    qkv,
)

DTYPES = [torch.float32, torch.bfloat16]
RANKS = [(4, 4, 4), (1, 0, 8), (0, 0, 5), (7, 3, 0), (0, 0, 0)]


def adapters_for(dtype: torch.dtype = torch.float32) -> list[AdapterWeights]:
    """The last changes nothing here."""
    return [
        adapter(ranks, slot, dtype, lookup_rank=0 if slot == 4 else 3)
        for slot, ranks in enumerate(RANKS)
    ]


def pool_for(dtype: torch.dtype = torch.float32, max_stack_bytes: int | None = None) -> AdapterPool:
    return make_pool(
        adapters_for(dtype), dtype, is_transposed=True, max_stack_bytes=max_stack_bytes
    )


def prepare(token_slots: list[int], pool: AdapterPool, *, stacked: bool) -> LoraRows:
    """`stacked`: of a step whose adapters were together before."""
    slots = np.array(token_slots)
    for _ in range(2 if stacked else 1):
        rows = torch_ops.prepare(slots, pool, CPU, all_layers=stacked)
    assert rows is not None
    return rows


STEPS = {
    "even decodes": [0, 0, 1, 1, 2, 2, 3, 3],
    "base rows first": [-1, -1, 0, 1, 2, 3],
    "uneven decodes": [-1, 0, 0, 0, 1, 2, 2, 3],
    "one adapter": [2, 2, 2],
    "an adapter without this site": [0, 0, 4, 4],
    "the same adapter twice": [0, 1, -1, 1, 1, 0],
    "a long run among short ones": [0, 1, *[2] * 40, 3],
    "decodes and prefills": [-1, 0, 1, 1, *[-1] * 5, *[1] * 35, *[3] * 50],
}


def plainly(slots: list[int], x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What each row's own adapter adds to its product and to its vector, one row at a time."""
    adapters = adapters_for(x.dtype)
    nothing = adapter((0, 0, 0), 0, lookup_rank=0)
    own = [nothing if slot == NO_ADAPTER else adapters[slot] for slot in slots]
    linear = [plain_linear(weights, x[row : row + 1]) for row, weights in enumerate(own)]
    vectors = [plain_embedding(weights, tokens[row : row + 1]) for row, weights in enumerate(own)]
    return torch.cat(linear), torch.cat(vectors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_stacks", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_mixed_ranks_and_base_rows_equal_the_naive_sum_w17(
    step: str, with_stacks: bool, dtype: torch.dtype
) -> None:
    """W17: mixed ranks, scalings, base and adapter rows in one batch equal running each alone; and
    the reference says the same, whichever way the pool lies."""
    slots = STEPS[step]
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(len(slots), HIDDEN, generator=generator).to(dtype)
    base = torch.randn(len(slots), sum(OUTS), generator=generator).to(dtype)
    tokens = torch.randint(0, VOCABULARY, (len(slots),), generator=generator)
    linear, vectors = plainly(slots, x, tokens)

    pool = pool_for(dtype)
    rows = prepare(slots, pool, stacked=with_stacks)
    ours, apart, looked_up = base.clone(), base.clone(), x.clone()
    torch_ops.add_linear(ours, x, qkv(pool), rows)
    torch_ops.expand(apart, torch_ops.shrink(x, qkv(pool), rows))
    torch_ops.add_embedding(looked_up, tokens, embedding(pool), rows)
    assert_close("lora", ours, base.float() + linear, dtype)
    assert_close("lora", apart, base.float() + linear, dtype)
    assert_close("lora", looked_up, x.float() + vectors, dtype)
    no_adapter = torch.tensor([slot in (NO_ADAPTER, 4) for slot in slots])
    assert torch.equal(ours[no_adapter], base[no_adapter])
    assert torch.equal(looked_up[no_adapter], x[no_adapter])
    if not no_adapter.all():
        assert not torch.equal(ours, base)

    for is_transposed in (False, True):
        other = make_pool(adapters_for(dtype), dtype, is_transposed=is_transposed)
        naive, vector = base.clone(), x.clone()
        reference.expand(naive, reference.shrink(x, qkv(other), rows))
        reference.add_embedding(vector, tokens, embedding(other), rows)
        assert_close("lora", naive, base.float() + linear, dtype)
        assert_close("lora", vector, x.float() + vectors, dtype)


@pytest.mark.parametrize("with_stacks", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_cut_into_pieces_adds_the_same_as_the_whole(step: str, with_stacks: bool) -> None:
    """Pieces in which a run begins or ends, and such without an adapter."""
    torch.manual_seed(4)
    slots = STEPS[step]
    torch.manual_seed(0)
    x, base = torch.randn(len(slots), HIDDEN), torch.randn(len(slots), sum(OUTS))
    pool = pool_for()
    rows = prepare(slots, pool, stacked=with_stacks)
    whole, pieces = base.clone(), base.clone()
    torch_ops.add_linear(whole, x, qkv(pool), rows)
    for size in (1, 3, len(slots) - 1, len(slots)):
        pieces.copy_(base)
        for first in range(0, len(slots), size):
            at = slice(first, min(first + size, len(slots)))
            own = rows.between(at.start, at.stop)
            assert (own is None) == all(slot == NO_ADAPTER for slot in slots[at])
            if own is not None:
                assert own.slots.tolist() == slots[at]
                torch_ops.add_linear(pieces[at], x[at], qkv(pool), own)
        assert_close("lora", pieces, whole, torch.float32)


def test_decodes_stay_together_in_the_piece_that_has_all_of_them() -> None:
    rows = prepare([0, 0, 1, 1, 2, 2, *[3] * 40], pool_for(), stacked=True)
    for last, is_together in ((4, False), (6, True), (20, True)):
        own = rows.between(0, last)
        assert own is not None
        assert own.batch is not None
        assert (own.batch.group is not None) == is_together


def test_a_site_that_no_adapter_changes_is_left_exactly_alone() -> None:
    torch.manual_seed(0)
    pool = pool_for()
    y = torch.randn(4, HIDDEN)
    for slots, stacked in (([0, 0, 1, 1], True), ([4, 4, 4, 0], False)):
        before = y.clone()
        rows = prepare(slots, pool, stacked=stacked)
        torch_ops.add_linear(y, torch.randn(4, HIDDEN), pool.sites[OTHER], rows)
        assert torch.equal(y, before)


def test_short_runs_of_adapters_that_come_again_are_computed_together() -> None:
    batch = prepare([-1, 0, 1, 1, 2, 2, *[3] * 40], pool_for(), stacked=True).batch
    assert batch is not None
    assert batch.group is not None
    assert [run.slot for run in batch.alone] == [3]
    assert len(batch.runs) == 4


def test_a_row_gone_to_nan_spoils_no_other_row() -> None:
    torch.manual_seed(0)
    pool = pool_for()
    for stacked in (True, False):
        rows = prepare([0, 0, 1, 2, 2, 3], pool, stacked=stacked)
        x, y = torch.randn(6, HIDDEN), torch.zeros(6, sum(OUTS))
        good = y.clone()
        torch_ops.add_linear(good, x, qkv(pool), rows)
        x[1] = torch.nan
        x[2] = torch.inf
        torch_ops.add_linear(y, x, qkv(pool), rows)
        assert not torch.isfinite(y[1]).all()
        for row in (0, 3, 4, 5):
            assert torch.equal(y[row], good[row])


@pytest.mark.parametrize("ops", [torch_ops, reference])
def test_a_step_without_adapters_is_none_w18(ops: ModuleType) -> None:
    """W18: a step with no adapter does no LoRA work."""
    pool = pool_for()
    assert ops.prepare(np.full(5, NO_ADAPTER), pool, CPU) is None
    assert ops.prepare(np.empty(0, np.int64), pool, CPU) is None


def test_an_empty_slot_is_an_error_and_never_the_base_model() -> None:
    with pytest.raises(RuntimeError, match="slot 5, which is empty"):
        torch_ops.prepare(np.array([5]), pool_for(), CPU)


def test_stacks_stay_within_their_memory_and_give_way_when_unused() -> None:
    pool = pool_for()
    weights = [pool.weights(slot) for slot in range(4)]
    first, second = (weights[0], weights[1]), (weights[0], weights[3])
    ranks = {1: (4, 4, 8), 3: (7, 4, 4)}  # the highest of each projection, with slot 0's
    sizes = {
        slot: 2 * sum(rank * (HIDDEN + out) for rank, out in zip(own, OUTS, strict=True)) * 4
        for slot, own in ranks.items()
    }
    size = max(sizes.values())
    stacks = Stacks(size)
    assert stacks.find(first) is None, "the first time is not worth a copy"
    assert stacks.find(first) is not None
    assert stacks.num_bytes == sizes[1]
    assert [stacks.find(second) for _ in range(NUM_REMEMBERED)] == [None] * NUM_REMEMBERED
    assert stacks.find(second) is not None, "the first was not used for long enough"
    assert stacks.num_bytes == sizes[3]
    assert stacks.find(first) is None


def test_stacks_larger_than_their_memory_are_never_made() -> None:
    pool = pool_for()
    weights = [pool.weights(slot) for slot in range(2)]
    for stacks in (Stacks(0), Stacks(1000)):
        assert [stacks.find((weights[0], weights[1])) for _ in range(3)] == [None] * 3
        assert stacks.num_bytes == 0


def test_stacks_forget_an_adapter_that_leaves() -> None:
    pool = pool_for()
    weights = [pool.weights(slot) for slot in range(2)]
    stacks = Stacks(2**20)
    for _ in range(2):
        found = stacks.find((weights[0], weights[1]))
    assert found is not None
    stacks.forget(weights[1])
    assert stacks.num_bytes == 0
    assert stacks.find((weights[0], weights[1])) is None
