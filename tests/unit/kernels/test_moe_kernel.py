"""Products with experts' weights: every version gives what the naive one gives."""

from __future__ import annotations

import pytest
import torch

from manyroots.kernels.moe import reference, torch_ops
from manyroots.kernels.moe.routing import SortedRouting, route
from manyroots.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16]


def random_routing(
    num_tokens: int, num_experts: int, experts_per_token: int, dtype: torch.dtype = torch.float32
) -> SortedRouting:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator).to(dtype)
    return route(logits, experts_per_token=experts_per_token, normalize=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "experts_per_token"),
    [(1, 8, 2), (7, 8, 3), (40, 8, 8), (5, 64, 1), (130, 16, 4), (3, 1, 1)],
)
def test_grouped_products_and_their_sums_equal_the_naive_ones(
    num_tokens: int, num_experts: int, experts_per_token: int, dtype: torch.dtype
) -> None:
    routing = random_routing(num_tokens, num_experts, experts_per_token, dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens * experts_per_token, 48, generator=generator).to(dtype)
    weight = torch.randn(num_experts, 20, 48, generator=generator).mul_(0.1).to(dtype)
    expected = reference.grouped_linear(x, weight, routing)
    actual = torch_ops.grouped_linear(x, weight, routing)
    assert_close("experts", actual, expected, dtype)
    assert_close(
        "experts",
        torch_ops.combine(expected, routing),
        reference.combine(expected, routing),
        dtype,
    )


def test_pairs_are_sorted_by_expert_and_find_their_tokens() -> None:
    logits = torch.tensor([[9.0, 0, 5, 1], [5, 0, 1, 9], [0, 0, 9, 5], [5, 0, 0, 9]])
    routing = route(logits, experts_per_token=2, normalize=False)
    assert routing.expert_index.tolist() == [0, 0, 0, 2, 2, 3, 3, 3]
    assert routing.token_index.tolist() == [0, 1, 3, 0, 2, 1, 2, 3]
    assert routing.expert_starts.tolist() == [0, 3, 3, 5, 8]
    assert routing.pair_index.tolist() == [[0, 3], [5, 1], [4, 6], [7, 2]]
    probabilities = logits.softmax(-1)
    assert torch.equal(routing.weight, probabilities[routing.token_index, routing.expert_index])


def test_normalized_weights_of_a_token_add_up_to_one() -> None:
    routing = random_routing(20, 8, 3)
    assert_close(
        "experts", routing.weight[routing.pair_index].sum(1), torch.ones(20), torch.float32
    )
    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    plain = route(logits, experts_per_token=3, normalize=False)
    assert plain.weight[plain.pair_index].sum(1).max() < 1


def test_an_expert_without_tokens_is_neither_listed_nor_read() -> None:
    routing = random_routing(2, 32, 2)
    hit = set(routing.expert_index.tolist())
    assert [expert for expert, _ in routing.segments] == sorted(hit)
    weight = torch.full((32, 6, 4), torch.nan)
    weight[sorted(hit)] = 1.0
    out = torch_ops.grouped_linear(torch.ones(4, 4), weight, routing)
    assert out.eq(4).all()


def test_a_token_that_went_to_nan_spoils_only_its_own_row() -> None:
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    logits[2] = torch.nan
    routing = route(logits, experts_per_token=3, normalize=True)
    x = torch.ones(6, 4)
    x[2] = torch.nan
    pairs = x[routing.token_index]
    out = torch_ops.combine(torch_ops.grouped_linear(pairs, torch.ones(8, 5, 4), routing), routing)
    assert out.isnan().any(1).tolist() == [False, False, True, False, False, False]


def test_a_step_of_no_tokens_gives_none() -> None:
    routing = route(torch.empty(0, 8), experts_per_token=3, normalize=True)
    assert routing.segments == []
    out = torch_ops.grouped_linear(torch.empty(0, 4), torch.ones(8, 5, 4), routing)
    assert torch_ops.combine(out, routing).shape == (0, 5)
