"""Adapters of experts: the fast version gives what the naive one gives, for every way to share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.kernels.expert_lora import reference, torch_ops
from manyroots.kernels.expert_lora.pairs import AdapterPairs, Segment
from manyroots.kernels.lora_sites.batch import AdapterBatch
from manyroots.kernels.lora_sites.weights import LowRank, Part, SlotWeights
from manyroots.kernels.moe import torch_ops as moe_ops
from manyroots.kernels.moe.routing import route
from manyroots.kernels.tolerances import assert_close

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
IN, OUTS = 24, (16, 16)
NUM_EXPERTS, PER_TOKEN = 6, 3
SITE = "gate_up"

Sharing = tuple[bool, bool]
"""Whether all experts have the same A, and the same B."""


def low_rank(
    ranks: Mapping[int, int], sharing: Sharing, seed: int, dtype: torch.dtype = torch.float32
) -> LowRank:
    """Parts of these ranks, by their number in OUTS."""
    generator = torch.Generator().manual_seed(seed)

    def draw(is_shared: bool, *shape: int) -> Tensor:
        count = 1 if is_shared else NUM_EXPERTS
        return (torch.randn(count, *shape, generator=generator) / 3).to(dtype)

    parts, start = [], 0
    for number, rank in ranks.items():
        first = sum(OUTS[:number])
        columns = slice(first, first + OUTS[number])
        parts.append(Part(slice(start, start + rank), columns, draw(sharing[1], rank, 16)))
        start += rank
    return LowRank(draw(sharing[0], start, IN), tuple(parts), sum(OUTS))


def adapter(*lows: LowRank) -> SlotWeights:
    experts = {SITE: lows} if lows else {}
    return SlotWeights({}, {}, experts, rank=8, buffer=torch.empty(0))


def adapters(dtype: torch.dtype = torch.float32) -> dict[int, SlotWeights]:
    """One of each kind; slot 6 changes nothing here."""
    each, both = (False, False), (True, True)
    return {
        0: adapter(low_rank({0: 4, 1: 4}, each, 0, dtype)),
        1: adapter(low_rank({0: 3, 1: 5}, (True, False), 1, dtype)),
        2: adapter(low_rank({0: 2, 1: 2}, (False, True), 2, dtype)),
        3: adapter(low_rank({1: 7}, both, 3, dtype)),
        4: adapter(low_rank({0: 1}, each, 4, dtype), low_rank({1: 6}, (True, False), 5, dtype)),
        5: adapter(low_rank({0: 3}, (False, True), 6, dtype), low_rank({1: 3}, both, 7, dtype)),
        6: adapter(),
    }


STEPS = {
    "one adapter": [0],
    "base rows around": [-1, -1, 1, 1, -1, 2],
    "decodes of all": [-1, 0, 1, 2, 3, 4, 5, 6],
    "the same adapter twice": [2, 3, -1, 2, 2],
    "prefills": [*[0] * 30, *[1] * 25, *[-1] * 9, *[2] * 20, *[5] * 31],
    "nothing here": [6, 6, -1],
}


def random_pairs(
    slots: list[int],
    weights: dict[int, SlotWeights],
    dtype: torch.dtype = torch.float32,
    *,
    num_experts_hit: int = NUM_EXPERTS,
) -> AdapterPairs:
    batch = AdapterBatch.build(np.array(slots), weights, None, CPU)
    assert batch is not None
    generator = torch.Generator().manual_seed(len(slots))
    logits = torch.randn(len(slots), NUM_EXPERTS, generator=generator).to(dtype)
    logits[:, num_experts_hit:] = -100
    return AdapterPairs(route(logits, experts_per_token=PER_TOKEN, normalize=True), batch)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
def test_adapters_of_experts_before_the_activation_equal_the_naive_ones_w15(
    step: str, dtype: torch.dtype
) -> None:
    """W15, W17: halves shared or not, mixed with base rows."""
    slots = STEPS[step]
    pairs = random_pairs(slots, adapters(dtype), dtype)
    x, base = draw(len(slots), IN, dtype=dtype), draw(len(slots) * PER_TOKEN, 32, dtype=dtype)
    ours, naive = base.clone(), base.clone()
    torch_ops.add_to_pairs(ours, x, SITE, pairs)
    reference.add_to_pairs(naive, x, SITE, pairs)
    assert_close("expert_lora", ours, naive, dtype)
    unchanged = torch.tensor([slots[token] in (-1, 6) for token in pairs.routing.token_index])
    assert torch.equal(ours[unchanged], base[unchanged])
    assert ours[~unchanged].ne(base[~unchanged]).any(dim=1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
def test_adapters_behind_experts_are_weighted_as_the_naive_ones_are_w15(
    step: str, dtype: torch.dtype
) -> None:
    """W15, W17: a half that all experts share may be applied behind the sum, and is."""
    slots = STEPS[step]
    pairs = random_pairs(slots, adapters(dtype), dtype)
    num_pairs = len(slots) * PER_TOKEN
    x, base = draw(num_pairs, IN, dtype=dtype), draw(num_pairs, 32, dtype=dtype)
    ours = torch_ops.combine(base.clone(), x, SITE, pairs)
    assert_close("expert_lora", ours, reference.combine(base.clone(), x, SITE, pairs), dtype)
    without = moe_ops.combine(base.clone(), pairs.routing)
    unchanged = torch.tensor([slot in (-1, 6) for slot in slots])
    assert torch.equal(ours[unchanged], without[unchanged])
    assert ours[~unchanged].ne(without[~unchanged]).any(dim=1).all()


def test_the_pairs_of_a_run_are_sorted_by_expert_and_find_their_tokens() -> None:
    logits = torch.tensor([[9.0, 0, 5, 1], [5, 0, 1, 9], [9, 0, 5, 1], [5, 0, 0, 9], [9, 0, 5, 0]])
    routing = route(logits, experts_per_token=2, normalize=False)
    assert routing.token_index.tolist() == [0, 1, 2, 3, 4, 0, 2, 4, 1, 3]
    batch = AdapterBatch.build(np.array([-1, 4, 4, 1, -1]), {4: adapter(), 1: adapter()}, None, CPU)
    assert batch is not None
    first, second = AdapterPairs(routing, batch).by_run
    assert first.places.tolist() == [1, 2, 6, 8]
    assert first.experts.tolist() == [0, 0, 2, 3]
    assert first.tokens.tolist() == [0, 1, 1, 0]
    assert first.by_token.tolist() == [[3, 0], [1, 2]]
    assert first.segments == [
        Segment(0, slice(0, 2), slice(1, 3)),
        Segment(2, slice(2, 3), slice(6, 7)),
        Segment(3, slice(3, 4), slice(8, 9)),
    ]
    assert second.places.tolist() == [3, 9]
    assert [segment.there for segment in second.segments] == [slice(3, 4), slice(9, 10)]


@pytest.mark.parametrize("num_tokens", [2, 5])
def test_experts_without_pairs_and_adapters_elsewhere_are_not_touched(num_tokens: int) -> None:
    weights = {0: adapter(low_rank({0: 4, 1: 4}, (False, False), 0))}
    pairs = random_pairs([0] * num_tokens, weights, num_experts_hit=4)
    hit = sorted(set(pairs.routing.expert_index.tolist()))
    assert len(hit) < NUM_EXPERTS
    [low] = weights[0].experts[SITE]
    for stack in (low.a, *(part.b for part in low.parts)):
        stack[[expert for expert in range(NUM_EXPERTS) if expert not in hit]] = torch.nan
    y = torch.zeros(num_tokens * PER_TOKEN, 32)
    torch_ops.add_to_pairs(y, draw(num_tokens, IN), SITE, pairs)
    assert y.isfinite().all()
    elsewhere = random_pairs([0] * num_tokens, weights)
    torch_ops.add_to_pairs(y, draw(num_tokens, IN), "another layer", elsewhere)
    assert "by_run" not in vars(elsewhere), "pairs are not even sorted by adapter"


@pytest.mark.parametrize("spoiled", [1, 3, 4])
def test_a_row_gone_to_nan_spoils_no_other_row_w17(spoiled: int) -> None:
    """W17: exact per row, also of the same adapter."""
    slots = [0, 1, 1, 2, 2, 5, -1]
    pairs = random_pairs(slots, adapters())
    tokens = pairs.routing.token_index
    x, by_pair = draw(7, IN), draw(7, IN).index_select(0, tokens)
    good, y = torch.zeros(21, 32), torch.zeros(21, 32)
    torch_ops.add_to_pairs(good, x, SITE, pairs)
    summed = torch_ops.combine(torch.zeros(21, 32), by_pair, SITE, pairs)
    x[spoiled], by_pair[tokens == spoiled] = torch.nan, torch.nan
    torch_ops.add_to_pairs(y, x, SITE, pairs)
    assert y[tokens == spoiled].isnan().all()
    assert torch.equal(y[tokens != spoiled], good[tokens != spoiled])
    out = torch_ops.combine(torch.zeros(21, 32), by_pair, SITE, pairs)
    others = torch.arange(7) != spoiled
    assert out[spoiled].isnan().all()
    assert torch.equal(out[others], summed[others])


def test_what_experts_share_is_multiplied_once_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    product = torch.mm

    def counted(x: Tensor, weight: Tensor, **out: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return product(x, weight, **out)

    monkeypatch.setattr(torch, "mm", counted)
    pairs = random_pairs([1], adapters())
    torch_ops.add_to_pairs(torch.zeros(3, 32), draw(1, IN), SITE, pairs)
    assert rows == [1], "the second halves of three experts are one batched product each"
    rows.clear()
    pairs = random_pairs([1] * 9, adapters())
    torch_ops.add_to_pairs(torch.zeros(27, 32), draw(9, IN), SITE, pairs)
    assert rows == [9], "the second halves are added where they belong, expert by expert"
