"""The LoRA kernel against the naive one, for every way in which a step's runs are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.lora import reference, torch_ops
from manyroots.kernels.lora.batch import AdapterBatch
from manyroots.kernels.lora.stacks import NUM_REMEMBERED, Stacks
from manyroots.kernels.lora.weights import LowRank, Part, SlotWeights
from manyroots.kernels.tolerances import assert_close

CPU = torch.device("cpu")
IN, OUTS = 24, (16, 8, 8)
VOCABULARY = 31
DTYPES = [torch.float32, torch.bfloat16]


def adapter(
    ranks: tuple[int, int, int], seed: int, dtype: torch.dtype = torch.float32
) -> SlotWeights:
    """One site "qkv" of three parts, of which rank 0 is not there; and an embedding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 3).to(dtype)

    parts, start, column = [], 0, 0
    for rank, out in zip(ranks, OUTS, strict=True):
        if rank:
            ranks_of = slice(start, start + rank)
            parts.append(Part(ranks_of, slice(column, column + out), draw(rank, out)))
        start, column = start + rank, column + out
    linears = {"qkv": LowRank(draw(start, IN), tuple(parts), sum(OUTS))} if parts else {}
    lookup = LowRank(draw(VOCABULARY, 3), (Part(slice(0, 3), slice(0, IN), draw(3, IN)),), IN)
    return SlotWeights(linears, {"embedding": lookup}, {}, rank=start, buffer=torch.empty(0))


def build(
    token_slots: list[int], weights: dict[int, SlotWeights], stacks: Stacks | None
) -> AdapterBatch:
    batch = AdapterBatch.build(np.array(token_slots), weights, stacks, CPU)
    assert batch is not None
    return batch


def stacked(token_slots: list[int], weights: dict[int, SlotWeights]) -> AdapterBatch:
    """A step whose adapters were together before."""
    stacks = Stacks(2**24)
    build(token_slots, weights, stacks)
    return build(token_slots, weights, stacks)


def weights_for(dtype: torch.dtype = torch.float32) -> dict[int, SlotWeights]:
    ranks = [(4, 4, 4), (1, 0, 8), (0, 0, 5), (7, 3, 0), (0, 0, 0)]
    return {slot: adapter(ranks[slot], slot, dtype) for slot in range(len(ranks))}


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_stacks", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_mixed_ranks_and_base_rows_equal_the_naive_sum_w17(
    step: str, with_stacks: bool, dtype: torch.dtype
) -> None:
    """W17: mixed ranks, scalings, base and adapter rows in one batch equal running each alone."""
    slots, weights = STEPS[step], weights_for(dtype)
    batch = stacked(slots, weights) if with_stacks else build(slots, weights, None)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(len(slots), IN, generator=generator).to(dtype)
    base = torch.randn(len(slots), sum(OUTS), generator=generator).to(dtype)
    tokens = torch.randint(0, VOCABULARY, (len(slots),), generator=generator)

    ours, naive = base.clone(), base.clone()
    torch_ops.add_linear(ours, x, "qkv", batch)
    reference.add_linear(naive, x, "qkv", batch)
    assert_close("lora", ours, naive, dtype)
    no_adapter = torch.tensor([slot in (NO_ADAPTER, 4) for slot in slots])
    assert torch.equal(ours[no_adapter], base[no_adapter])
    if not no_adapter.all():
        assert not torch.equal(ours, base)

    ours, naive = x.clone(), x.clone()
    torch_ops.add_embedding(ours, tokens, "embedding", batch)
    reference.add_embedding(naive, tokens, "embedding", batch)
    assert_close("lora", ours, naive, dtype)


def test_a_site_that_no_adapter_changes_is_left_exactly_alone() -> None:
    torch.manual_seed(0)
    y = torch.randn(4, sum(OUTS))
    for batch in (stacked([0, 0, 1, 1], weights_for()), build([4, 4, 4, 0], weights_for(), None)):
        before = y.clone()
        torch_ops.add_linear(y, torch.randn(4, IN), "another site", batch)
        assert torch.equal(y, before)


def test_short_runs_of_adapters_that_come_again_are_computed_together() -> None:
    batch = stacked([-1, 0, 1, 1, 2, 2, *[3] * 40], weights_for())
    assert batch.group is not None
    assert [run.slot for run in batch.alone] == [3]
    assert len(batch.runs) == 4


def test_a_row_gone_to_nan_spoils_no_other_row() -> None:
    torch.manual_seed(0)
    slots = [0, 0, 1, 2, 2, 3]
    for batch in (stacked(slots, weights_for()), build(slots, weights_for(), None)):
        x, y = torch.randn(6, IN), torch.zeros(6, sum(OUTS))
        good = y.clone()
        torch_ops.add_linear(good, x, "qkv", batch)
        x[1] = torch.nan
        x[2] = torch.inf
        torch_ops.add_linear(y, x, "qkv", batch)
        assert not torch.isfinite(y[1]).all()
        for row in (0, 3, 4, 5):
            assert torch.equal(y[row], good[row])


def test_a_step_without_adapters_is_none_w18() -> None:
    """W18: a step with no adapter does no LoRA work."""
    assert AdapterBatch.build(np.full(5, NO_ADAPTER), {}, Stacks(1), CPU) is None
    assert AdapterBatch.build(np.empty(0, np.int64), {}, Stacks(1), CPU) is None


def test_an_empty_slot_is_an_error_and_never_the_base_model() -> None:
    with pytest.raises(KeyError):
        AdapterBatch.build(np.array([5]), weights_for(), Stacks(1), CPU)


def test_stacks_stay_within_their_memory_and_give_way_when_unused() -> None:
    weights = weights_for()
    first, second = (weights[0], weights[1]), (weights[0], weights[3])
    size = 2 * 12 * (IN + sum(OUTS)) * 4  # the ranks of slot 0 add up to 12
    stacks = Stacks(size)
    assert stacks.find(first) is None, "the first time is not worth a copy"
    assert stacks.find(first) is not None
    assert stacks.num_bytes == size
    assert [stacks.find(second) for _ in range(NUM_REMEMBERED)] == [None] * NUM_REMEMBERED
    assert stacks.find(second) is not None, "the first was not used for long enough"
    assert stacks.num_bytes == size
    assert stacks.find(first) is None


def test_stacks_larger_than_their_memory_are_never_made() -> None:
    weights = weights_for()
    for stacks in (Stacks(0), Stacks(1000)):
        assert [stacks.find((weights[0], weights[1])) for _ in range(3)] == [None] * 3
        assert stacks.num_bytes == 0


def test_stacks_forget_an_adapter_that_leaves() -> None:
    weights = weights_for()
    stacks = Stacks(2**20)
    for _ in range(2):
        found = stacks.find((weights[0], weights[1]))
    assert found is not None
    stacks.forget(weights[1])
    assert stacks.num_bytes == 0
    assert stacks.find((weights[0], weights[1])) is None
