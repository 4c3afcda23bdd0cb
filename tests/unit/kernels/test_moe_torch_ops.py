"""Mixture of experts with torch's operators against the naive reference, also with adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.ids import AdapterDigest, AdapterSlot
from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.fused_moe import reference, torch_adapters, torch_ops
from manyroots.kernels.fused_moe.adapters import ExpertAdapters
from manyroots.kernels.fused_moe.routing import Routing, Scoring
from manyroots.kernels.fused_moe.torch_pairs import ExpertSlice, PairsByAdapter, SortedPairs
from manyroots.kernels.fused_moe.weights import ExpertWeights
from manyroots.kernels.lora_ops.torch_ops import prepare
from manyroots.kernels.tolerances import assert_close
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_sites import LoraSite
from manyroots.store.adapter_weights import AdapterWeights, LoraPair

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
NUM_EXPERTS, PER_TOKEN, HIDDEN, INNER = 6, 3, 24, 16
SIZES = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 8) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(
    num_tokens: int,
    num_experts: int = NUM_EXPERTS,
    top_k: int = PER_TOKEN,
    scoring: Scoring = Scoring.SOFTMAX_RENORMALISED,
) -> Routing:
    return torch_ops.route(draw(num_tokens, num_experts, seed=num_tokens), top_k, scoring=scoring)


def weights(
    dtype: torch.dtype = torch.float32,
    activation: Activation = Activation.SILU,
    *,
    num_experts: int = NUM_EXPERTS,
    has_bias: bool = False,
) -> ExpertWeights:
    return ExpertWeights(
        draw(num_experts, 2 * INNER, HIDDEN, dtype=dtype, seed=1) * HIDDEN**-0.5,
        draw(num_experts, HIDDEN, INNER, dtype=dtype, seed=2) * INNER**-0.5,
        draw(num_experts, 2 * INNER, dtype=dtype, seed=3) if has_bias else None,
        draw(num_experts, HIDDEN, dtype=dtype, seed=4) if has_bias else None,
        activation,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", Scoring)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (7, 8, 3), (40, 8, 8), (5, 64, 1), (130, 16, 4), (3, 1, 1), (0, 8, 3)],
)
def test_routing_equals_the_reference(
    num_tokens: int, num_experts: int, top_k: int, has_bias: bool, scoring: Scoring,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    scores = draw(num_tokens, num_experts, dtype=dtype)
    bias = draw(num_experts, dtype=dtype, seed=5) if has_bias else None
    routing = torch_ops.route(scores, top_k, scoring=scoring, bias=bias)
    expected = reference.route(scores, top_k, scoring=scoring, bias=bias)
    assert_close("experts", routing.weights, expected.weights, torch.float32)
    groups = expected.groups
    for ours, naive in (
        (routing.experts, expected.experts),
        (routing.pairs, expected.pairs),
        (routing.groups, groups[groups[:, 1] < groups[:, 2]]),
    ):
        assert ours.dtype is torch.int32
        assert torch.equal(ours, naive)


def test_pairs_are_sorted_by_expert_and_find_their_tokens() -> None:
    scores = torch.tensor([[9.0, 0, 5, 1], [5, 0, 1, 9], [0, 0, 9, 5], [5, 0, 0, 9]])
    routing = torch_ops.route(scores, 2, scoring=Scoring.SOFTMAX)
    pairs = SortedPairs.of(routing)
    assert pairs.experts.tolist() == [0, 0, 0, 2, 2, 3, 3, 3]
    assert pairs.tokens.tolist() == [0, 1, 3, 0, 2, 1, 2, 3]
    assert pairs.segments == [(0, slice(0, 3)), (2, slice(3, 5)), (3, slice(5, 8))]
    assert pairs.places.tolist() == [[0, 3], [5, 1], [4, 6], [7, 2]]
    probabilities = scores.softmax(-1).gather(1, routing.experts.long())
    assert torch.equal(routing.weights, probabilities)


def test_weights_of_a_token_add_up_to_one_unless_they_are_left_as_they_are() -> None:
    for scoring in (Scoring.SOFTMAX_RENORMALISED, Scoring.SOFTMAX_OF_CHOSEN):
        total = routed(20, 8, scoring=scoring).weights.sum(1)
        assert_close("experts", total, torch.ones(20), torch.float32)
    assert routed(20, 8, scoring=Scoring.SOFTMAX).weights.sum(1).max() < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (40, 8, 8), (5, 64, 1), (130, 16, 4)]
)
def test_experts_equal_the_reference(
    num_tokens: int, num_experts: int, top_k: int, activation: Activation, has_bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    routing = routed(num_tokens, num_experts, top_k)
    given = weights(dtype, activation, num_experts=num_experts, has_bias=has_bias)
    x = draw(num_tokens, HIDDEN, dtype=dtype)
    out = torch_ops.experts(x, routing, given)
    assert out.dtype is dtype
    assert_close("expert_lora", out, reference.experts(x, routing, given).sum(0), dtype)


def test_an_expert_without_tokens_is_not_read() -> None:
    routing = routed(1, 32, 2)
    hit = routing.experts[0].tolist()
    given = weights(num_experts=32, has_bias=True)
    assert given.gate_up_bias is not None
    assert given.down_bias is not None
    for stack in (given.gate_up, given.down, given.gate_up_bias, given.down_bias):
        stack[[expert for expert in range(32) if expert not in hit]] = torch.nan
    assert torch_ops.experts(draw(1, HIDDEN), routing, given).isfinite().all()


def test_a_token_that_went_to_nan_spoils_only_its_own_row() -> None:
    scores, x = draw(6, NUM_EXPERTS), draw(6, HIDDEN)
    scores[2], x[2] = torch.nan, torch.nan
    routing = torch_ops.route(scores, PER_TOKEN, scoring=Scoring.SOFTMAX_RENORMALISED)
    out = torch_ops.experts(x, routing, weights())
    assert out.isnan().any(1).tolist() == [False, False, True, False, False, False]


def test_a_step_of_no_tokens_gives_none() -> None:
    routing = routed(0)
    assert SortedPairs.of(routing).segments == []
    assert torch_ops.experts(draw(0, HIDDEN), routing, weights()).shape == (0, HIDDEN)


Halves = dict[str, tuple[int, bool, bool]]
"""Of each projection that an adapter changes: its rank, and whether experts share A, and B."""
ADAPTERS: dict[int, Halves] = {
    0: dict.fromkeys(SIZES, (4, False, False)),
    1: {"gate": (3, True, False), "up": (5, True, False), "down": (2, False, True)},
    2: {"gate": (2, False, True), "up": (2, False, True), "down": (6, True, False)},
    3: {"up": (7, True, True), "down": (3, True, True)},
    4: {"gate": (1, False, False), "up": (6, True, False)},
    5: {"gate": (3, False, True), "up": (3, True, True), "down": (1, False, False)},
    6: {},
}
"""One of each kind; slot 6 changes nothing here."""
STEPS = {
    "one adapter": [0],
    "base rows around": [-1, -1, 1, 1, -1, 2],
    "decodes of all": [-1, 0, 1, 2, 3, 4, 5, 6],
    "the same adapter twice": [2, 3, -1, 2, 2],
    "prefills": [*[0] * 30, *[1] * 25, *[-1] * 9, *[2] * 20, *[5] * 31],
    "nothing here": [6, 6, -1],
}


class Layer:
    """One layer's sites, in a pool with all of the adapters above."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        kind = TargetKind.EXPERTS
        gate_up = LoraSite(kind, HIDDEN, {"gate": INNER, "up": INNER}, num_experts=NUM_EXPERTS)
        down = LoraSite(kind, INNER, {"down": HIDDEN}, num_experts=NUM_EXPERTS)
        other = LoraSite(TargetKind.LINEAR, 8, {"": 8})
        self.parts = {
            **dict(gate_up.targets("m")), **dict(down.targets("m")), **dict(other.targets("o")),
        }  # fmt: skip
        self.pool = AdapterPool(
            self.parts, num_slots=len(ADAPTERS), max_rank=8, dtype=dtype, device=CPU
        )
        for slot, halves in ADAPTERS.items():
            self.pool.load(AdapterSlot(slot), _adapter(halves, dtype, seed=10 * slot))
        self.gate_up, self.down = self.pool.expert_sites[gate_up], self.pool.expert_sites[down]

    def adapters(self, slots: list[int]) -> ExpertAdapters:
        rows = prepare(np.array(slots), self.pool, CPU)
        assert rows is not None
        return ExpertAdapters(self.gate_up, self.down, rows)

    def pairs(self, slots: list[int], routing: Routing) -> PairsByAdapter:
        batch = self.adapters(slots).rows.batch
        assert batch is not None
        return PairsByAdapter(SortedPairs.of(routing), batch)


def _adapter(halves: Halves, dtype: torch.dtype, seed: int) -> AdapterWeights:
    pairs = {"o": LoraPair(draw(2, 8, dtype=dtype), draw(8, 2, dtype=dtype), 1.0)}
    for name, (rank, shares_a, shares_b) in halves.items():
        num_in, num_out = SIZES[name]
        a = draw(1 if shares_a else NUM_EXPERTS, rank, num_in, dtype=dtype, seed=seed) / 3
        b = draw(1 if shares_b else NUM_EXPERTS, num_out, rank, dtype=dtype, seed=seed + 1) / 3
        pairs[f"m.{name}"] = LoraPair(a, b, 0.25 + rank / 16)
    whole = [half for pair in pairs.values() for half in (pair.a, pair.b)]
    buffer = torch.cat([half.flatten() for half in whole])
    return AdapterWeights(AdapterDigest(bytes([seed])), pairs, buffer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_adapters_of_experts_equal_the_reference_w15_w17(
    step: str, has_bias: bool, dtype: torch.dtype
) -> None:
    """W15, W17: gate and up before the activation and down weighted by the router, halves shared or
    not, ranks mixed, base rows between."""
    slots = STEPS[step]
    adapters = Layer(dtype).adapters(slots)
    routing, given = routed(len(slots)), weights(dtype, has_bias=has_bias)
    x = draw(len(slots), HIDDEN, dtype=dtype)
    out = torch_ops.experts(x, routing, given, adapters)
    expected = reference.experts(x, routing, given, adapters).sum(0)
    assert_close("expert_lora", out, expected, dtype)
    base = torch_ops.experts(x, routing, given)
    for row, slot in enumerate(slots):
        assert torch.equal(out[row], base[row]) == (slot in (-1, 6))


def test_the_pairs_of_a_run_are_sorted_by_expert_and_find_their_tokens() -> None:
    scores = torch.tensor([[9.0, 0, 5, 1], [5, 0, 1, 9], [9, 0, 5, 1], [5, 0, 0, 9], [9, 0, 5, 0]])
    routing = torch_ops.route(scores, 2, scoring=Scoring.SOFTMAX)
    pairs = Layer().pairs([-1, 4, 4, 1, -1], routing)
    assert pairs.pairs.tokens.tolist() == [0, 1, 2, 3, 4, 0, 2, 4, 1, 3]
    first, second = pairs.by_run
    assert first.places.tolist() == [1, 2, 6, 8]
    assert first.experts.tolist() == [0, 0, 2, 3]
    assert first.tokens.tolist() == [0, 1, 1, 0]
    assert first.by_token.tolist() == [[3, 0], [1, 2]]
    assert first.segments == [
        ExpertSlice(0, slice(0, 2), slice(1, 3)),
        ExpertSlice(2, slice(2, 3), slice(6, 7)),
        ExpertSlice(3, slice(3, 4), slice(8, 9)),
    ]
    assert second.places.tolist() == [3, 9]
    assert [segment.there for segment in second.segments] == [slice(3, 4), slice(9, 10)]


@pytest.mark.parametrize("num_tokens", [2, 5])
def test_adapters_of_experts_without_pairs_and_of_other_layers_are_not_touched(
    num_tokens: int,
) -> None:
    layer = Layer()
    scores = draw(num_tokens, NUM_EXPERTS)
    scores[:, 4:] = -100
    routing = torch_ops.route(scores, PER_TOKEN, scoring=Scoring.SOFTMAX)
    missed = sorted(set(range(NUM_EXPERTS)) - set(routing.experts.flatten().tolist()))
    assert missed
    for site in (layer.gate_up, layer.down):
        for low in layer.pool.weights(0).experts[site]:
            for stack in (low.a, *(part.b for part in low.parts)):
                stack[missed] = torch.nan
    out = torch_ops.experts(
        draw(num_tokens, HIDDEN), routing, weights(), layer.adapters([0] * num_tokens)
    )
    assert out.isfinite().all()
    elsewhere = layer.pairs([0] * num_tokens, routing)
    y = torch.zeros(num_tokens * PER_TOKEN, 2 * INNER)
    torch_adapters.add_to_pairs(y, draw(num_tokens, HIDDEN), Layer().gate_up, elsewhere)
    assert "by_run" not in vars(elsewhere), "pairs are not even sorted by adapter"


@pytest.mark.parametrize("spoiled", [1, 3, 4])
def test_a_row_gone_to_nan_spoils_no_other_row_w17(spoiled: int) -> None:
    """W17: exact per row, also of the same adapter."""
    slots = [0, 1, 1, 2, 2, 5, -1]
    adapters, routing = Layer().adapters(slots), routed(len(slots))
    x = draw(len(slots), HIDDEN)
    good = torch_ops.experts(x, routing, weights(), adapters)
    x[spoiled] = torch.nan
    out = torch_ops.experts(x, routing, weights(), adapters)
    others = torch.arange(len(slots)) != spoiled
    assert out[spoiled].isnan().all()
    assert torch.equal(out[others], good[others])


def test_what_experts_share_is_multiplied_once_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    rows: list[int] = []
    product = torch.mm

    def counted(x: Tensor, weight: Tensor, **out: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return product(x, weight, **out)

    monkeypatch.setattr(torch, "mm", counted)
    for num_tokens in (1, 9):
        rows.clear()
        pairs = layer.pairs([1] * num_tokens, routed(num_tokens))
        y = torch.zeros(num_tokens * PER_TOKEN, 2 * INNER)
        torch_adapters.add_to_pairs(y, draw(num_tokens, HIDDEN), layer.gate_up, pairs)
        # Second halves are batched products, or added where they belong, expert by expert.
        assert rows == [num_tokens]
