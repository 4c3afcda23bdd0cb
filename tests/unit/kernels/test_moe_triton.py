"""Mixture of experts in Triton against the naive reference."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, make_site, randn

from manyroots.kernels.lora_ops import reference as sites  # isort: skip
from manyroots.kernels.lora_ops.sites import LoraTerm  # isort: skip
from manyroots.kernels.fused_moe import reference  # isort: skip
from manyroots.kernels.fused_moe import triton as fast  # isort: skip
from manyroots.kernels.fused_moe.routing import ExpertGroups, Routing, Scoring  # isort: skip
from manyroots.kernels.fused_moe.weights import ExpertWeights  # isort: skip
from manyroots.kernels.norm import triton as norm  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

from manyroots.lora.targets import TargetKind  # isort: skip
from manyroots.store.adapter_pool import AdapterPool  # isort: skip
from manyroots.store.adapter_sites import LoraSite  # isort: skip
from manyroots.store.adapter_weights import AdapterWeights, LoraPair  # isort: skip
from manyroots.kernels.fused_moe.adapters import ExpertAdapters  # isort: skip
from manyroots.ids import AdapterDigest, AdapterSlot  # isort: skip

RENORMALISED = Scoring.SOFTMAX_RENORMALISED
TILING = fast.ExpertTiling(up_n=16, up_k=32, down_n=16, down_k=16, num_stages=2)


@pytest.mark.parametrize("scoring", Scoring)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 2), (7, 24, 4), (40, 16, 1), (5, 12, 3)]
)
@pytest.mark.parametrize("most", [fast.MAX_ROUTED_TOKENS, 0])
def test_routing_equals_the_reference(
    most: int, tokens: int, experts: int, top_k: int, has_bias: bool, scoring: Scoring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    scores = randn(2, tokens, experts)
    bias = randn(experts, seed=8) if has_bias else None
    routing = fast.route(scores, top_k, scoring=scoring, bias=bias)
    expected = reference.route(scores, top_k, scoring=scoring, bias=bias)
    assert_close("lora", routing.weights, expected.weights, torch.float32)
    lists = by_expert(routing)
    assert lists == by_expert(expected)
    used_first = routing.groups.tolist()[: min(experts, tokens * top_k)]
    assert most == 0 or {expert for expert, _, _ in used_first} >= set(lists)


@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.SIGMOID_RENORMALISED])
@pytest.mark.parametrize(
    ("experts", "groups"), [(12, (4, 2)), (20, (5, 2)), (8, (8, 3)), (16, (2, 1))]
)
def test_f01_experts_are_chosen_within_the_chosen_groups(
    experts: int, groups: tuple[int, int], scoring: Scoring
) -> None:
    """F01: groups of 3, 4, 1 and 8 experts; never one of a group that was not chosen."""
    scores, bias = randn(7, experts), randn(experts, seed=8)
    bias = bias if scoring.is_by_expert else None
    own = ExpertGroups(*groups)
    routing = fast.route(scores, 3, scoring=scoring, bias=bias, groups=own)
    expected = reference.route(scores, 3, scoring=scoring, bias=bias, groups=own)
    assert_close("lora", routing.weights, expected.weights, torch.float32)
    assert by_expert(routing) == by_expert(expected)
    used = expected.experts // (experts // own.count)
    assert all(len(set(row)) <= own.chosen for row in used.tolist())
    free = reference.route(scores, 3, scoring=scoring, bias=bias)
    assert torch.equal(free.experts, expected.experts) == (own.chosen >= 3)


@pytest.mark.parametrize(
    "dtype", DTYPES if DEVICE.type == "cuda" else [torch.float32, torch.float16]
)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("slots", [(0,), (-1,), (2, 2, -1, 0, 1, 3), (*range(-1, 4),) * 4])
@pytest.mark.parametrize("most", [fast.MAX_ROUTED_TOKENS, 0])
def test_routing_with_adapters_equals_the_reference_w17(
    most: int, slots: tuple[int, ...], num_splits: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """W17: each row's own adapter, of any rank, none (slot 1) and the base (-1) among them; values
    beyond an adapter's rank are not read."""
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    experts, hidden, top_k = 24, 32, 4
    site = make_site(hidden, (experts,), [[8], [0], [40], [16]], dtype)
    rows = make_rows(*sorted(slots))
    logits = randn(2, len(slots), experts)
    term = sites.shrink(randn(len(slots), hidden, dtype=dtype, seed=4), site, rows)
    parts = torch.full((num_splits, len(slots), site.width), float("nan"), device=DEVICE)
    for row, slot in enumerate(rows.slots.tolist()):
        rank = 0 if slot < 0 else int(site.table[slot, 1])
        parts[:, row, :rank] = term.hidden[0, row, :rank] / num_splits
    clean = LoraTerm(parts.nan_to_num(0.0), site, rows)
    got = fast.route(logits, top_k, LoraTerm(parts, site, rows), scoring=RENORMALISED)
    wanted = reference.route(logits, top_k, clean, scoring=RENORMALISED)
    assert_close("lora", got.weights, wanted.weights, torch.float32)
    assert by_expert(got) == by_expert(wanted)
    if set(slots) - {-1, 1}:
        base = reference.route(logits, top_k, scoring=RENORMALISED)
        assert by_expert(wanted) != by_expert(base)


def by_expert(routing: Routing) -> dict[int, list[int]]:
    pairs = routing.pairs.tolist()
    return {
        expert: pairs[begin:end] for expert, begin, end in routing.groups.tolist() if end > begin
    }


@pytest.mark.parametrize("scoring", Scoring)
def test_of_equally_likely_experts_the_first_are_chosen(scoring: Scoring) -> None:
    """In half precision scores of two experts are often the same number."""
    draw = torch.Generator().manual_seed(8)
    scores = torch.randint(0, 4, (40, 16), generator=draw).to(DEVICE, torch.float32)
    routing = fast.route(scores, 3, scoring=scoring)
    expected = reference.route(scores, 3, scoring=scoring)
    assert torch.equal(routing.experts, expected.experts)
    best = scores[0].argmax()  # torch's own is the first, too
    assert int(expected.experts[0, 0]) == int(best)


@pytest.mark.parametrize("more", [0, 1])
def test_tokens_beyond_the_most_are_routed_in_tiles(more: int) -> None:
    logits = randn(fast.MAX_ROUTED_TOKENS + more, 4)
    routing = fast.route(logits, 2, scoring=RENORMALISED)
    assert (routing.tiles is not None) == bool(more)
    assert by_expert(routing) == by_expert(reference.route(logits, 2, scoring=RENORMALISED))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("most", [fast.MAX_ROUTED_TOKENS, 0], ids=["one launch", "tiles"])
def test_experts_equal_the_reference_and_sum_up_in_the_norm(
    most: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 tokens over 4 experts: more pairs per expert than one tile holds."""
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    experts, hidden, inner, top_k = 4, 64, 48, 2
    x = randn(tokens, hidden, dtype=dtype)
    gate_up = randn(experts, 2 * inner, hidden, dtype=dtype, seed=1) * hidden**-0.5
    down = randn(experts, hidden, inner, dtype=dtype, seed=2) * inner**-0.5
    weights = ExpertWeights(gate_up, down)
    routing = fast.route(randn(tokens, experts, seed=3), top_k, scoring=RENORMALISED)
    expected = reference.experts(x, routing, weights)
    for _ in range(2):  # the counters must be as they were
        out = fast.experts(x, routing, weights, tiling=TILING)
        assert_close("lora", out, expected, dtype)
    residual, weight = torch.zeros_like(x), torch.ones(hidden, dtype=dtype, device=DEVICE)
    norm.add_rms_norm(residual, out, weight, 1e-6)
    assert_close("lora", residual, expected.sum(0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "inner"), [(1, 4, 40), (5, 8, 64), (16, 4, 96)])
def test_a_shared_block_is_one_more_term(
    tokens: int, experts: int, inner: int, dtype: torch.dtype
) -> None:
    """Of any width, unlike the experts'; and nothing is left in the counters."""
    hidden, own, top_k = 64, 48, 2
    x = randn(tokens, hidden, dtype=dtype)
    weights, shared = (
        ExpertWeights(
            randn(count, 2 * size, hidden, dtype=dtype, seed=seed) * hidden**-0.5,
            randn(count, hidden, size, dtype=dtype, seed=seed + 1) * size**-0.5,
        )
        for count, size, seed in ((experts, own, 1), (1, inner, 5))
    )
    routing = fast.route(randn(tokens, experts, seed=3), top_k, scoring=RENORMALISED)
    expected = reference.experts(x, routing, weights, None, shared)
    assert torch.equal(expected[:top_k], reference.experts(x, routing, weights))
    gate, up = (x.float() @ shared.gate_up[0].float().t()).chunk(2, dim=-1)
    every = (torch.nn.functional.silu(gate) * up) @ shared.down[0].float().t()
    assert torch.allclose(expected[top_k], every, rtol=0.05, atol=0.05)
    for _ in range(2):
        out = fast.experts(x, routing, weights, None, shared, tiling=TILING)
        assert_close("lora", out, expected, dtype)
    out = fast.experts(x, routing, weights, tiling=TILING)
    assert_close("lora", out, expected[:top_k], dtype)


def test_a_shared_block_of_many_tokens_is_refused() -> None:
    x = randn(fast.MOST_JOINED_TOKENS + 1, 64)
    weights = ExpertWeights(randn(4, 96, 64), randn(4, 64, 48))
    routing = fast.route(randn(len(x), 4), 2, scoring=RENORMALISED)
    with pytest.raises(ValueError, match="few tokens"):
        fast.experts(x, routing, weights, None, ExpertWeights(randn(1, 96, 64), randn(1, 64, 48)))


EXPERTS, HIDDEN, INNER = 4, 64, 48
SHAPES = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}


def pool_of_adapters(dtype: torch.dtype) -> tuple[AdapterPool, LoraSite, LoraSite]:
    """Three: one per expert, one that shares a half of each pair, one on gates alone. Their copies
    are the host's, as a load takes them: it has a stream of its own, which waits for no other."""
    both = LoraSite(TargetKind.EXPERTS, HIDDEN, {"gate": INNER, "up": INNER}, num_experts=EXPERTS)
    down = LoraSite(TargetKind.EXPERTS, INNER, {"down": HIDDEN}, num_experts=EXPERTS)
    parts = {**dict(both.targets("m")), **dict(down.targets("m"))}
    pool = AdapterPool(
        parts, num_slots=3, max_rank=20, dtype=dtype, device=DEVICE, is_transposed=False
    )
    for slot, (rank, names) in enumerate([(20, SHAPES), (5, SHAPES), (8, ["gate"])]):
        pairs = {}
        for seed, name in enumerate(names):
            k, n = SHAPES[name]
            shares = slot == 1
            a = randn(1 if shares and name != "down" else EXPERTS, rank, k, dtype=dtype, seed=seed)
            b = randn(1 if shares and name == "down" else EXPERTS, n, rank, dtype=dtype, seed=9)
            pairs[f"m.{name}"] = LoraPair(a.cpu() * k**-0.5, b.cpu() * 0.3, 0.5 + slot)
        flat = torch.cat([half.reshape(-1) for p in pairs.values() for half in (p.a, p.b)])
        pool.load(AdapterSlot(slot), AdapterWeights(AdapterDigest(b""), _cut(pairs, flat), flat))
    return pool, both, down


def _cut(pairs: dict[str, LoraPair], flat: torch.Tensor) -> dict[str, LoraPair]:
    """The same pairs, as pieces of one buffer."""
    halves = [half for p in pairs.values() for half in (p.a, p.b)]
    pieces = torch.split(flat, [half.numel() for half in halves])
    views = [piece.view(half.shape) for piece, half in zip(pieces, halves, strict=True)]
    return {
        name: LoraPair(a, b, pair.scaling)
        for (name, pair), a, b in zip(pairs.items(), views[::2], views[1::2], strict=True)
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[0], [-1, -1, 0, 0, 1, 1, 2], [-1] * 3 + [1] * 20 + [2] * 17])
@pytest.mark.parametrize("most", [fast.MAX_ROUTED_TOKENS, 0], ids=["each pair", "tiles of pairs"])
def test_adapters_of_experts_equal_the_reference(
    most: int, slots: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every expert or shared, of different ranks, with tokens of the base model among them."""
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    pool, both, down = pool_of_adapters(dtype)
    x = randn(len(slots), HIDDEN, dtype=dtype)
    gate_up = randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype, seed=1) * HIDDEN**-0.5
    w_down = randn(EXPERTS, HIDDEN, INNER, dtype=dtype, seed=2) * INNER**-0.5
    routing = fast.route(randn(len(slots), EXPERTS, seed=3), 2, scoring=RENORMALISED)
    adapters = ExpertAdapters(
        pool.expert_sites[both],
        pool.expert_sites[down],
        make_rows(*slots),
    )
    weights = ExpertWeights(gate_up, w_down)
    out = fast.experts(x, routing, weights, adapters, tiling=TILING)
    expected = reference.experts(x, routing, weights, adapters)
    assert_close("lora", out.sum(0), expected.sum(0), dtype)
    base = reference.experts(x, routing, weights)
    changed = (expected - base).abs().amax(dim=(0, 2)) > 1e-2
    assert changed.tolist() == [slot >= 0 for slot in slots]
