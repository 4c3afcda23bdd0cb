"""The block of experts against transformers' version of it."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.choice import kernels_for
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.moe import Experts, SparseMLP
from manyroots.layers.spec import ExpertsSpec
from manyroots.layers.step import Step
from tests.unit.layers.contexts import cpu_context
from tests.unit.models.tiny import tiny_config

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
HIDDEN = 48


def spec(norm_topk_prob: bool) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=8,
        experts_per_token=3,
        intermediate_size=24,
        activation=Activation.SILU,
        scoring=Scoring.SOFTMAX_RENORMALISED if norm_topk_prob else Scoring.SOFTMAX,
    )


NOTHING = Step(ropes=(), memories=(), lora=None)


def our_block(norm_topk_prob: bool, dtype: torch.dtype) -> SparseMLP:
    return SparseMLP(spec(norm_topk_prob), cpu_context(HIDDEN, dtype))


def their_block(norm_topk_prob: bool, dtype: torch.dtype) -> Qwen3MoeSparseMoeBlock:
    config = tiny_config("qwen3-moe", norm_topk_prob=norm_topk_prob)
    block = Qwen3MoeSparseMoeBlock(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return block


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@torch.no_grad()
def test_the_router_chooses_and_weighs_exactly_as_transformers_does(
    norm_topk_prob: bool, dtype: torch.dtype
) -> None:
    theirs = their_block(norm_topk_prob, dtype).gate
    ours = our_block(norm_topk_prob, dtype).router
    ours.weight.data.copy_(theirs.weight)
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    _, weights, experts = theirs(x)
    scoring = spec(norm_topk_prob).scoring
    routing = kernels_for(CPU).fused_moe.route(ours(x, NOTHING).sums, 3, scoring=scoring)
    assert torch.equal(routing.experts.long(), experts)
    assert torch.equal(routing.weights.to(dtype), weights.to(dtype))


@pytest.mark.parametrize("num_tokens", [1, 50])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@torch.no_grad()
def test_a_block_of_experts_equals_transformers(
    norm_topk_prob: bool, dtype: torch.dtype, num_tokens: int
) -> None:
    theirs = their_block(norm_topk_prob, dtype)
    ours = our_block(norm_topk_prob, dtype)
    ours.router.weight.data.copy_(theirs.gate.weight)
    ours.experts.data.gate_up.copy_(theirs.experts.gate_up_proj)
    ours.experts.data.down.copy_(theirs.experts.down_proj)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = x.clone()
    assert_close("experts", ours(x, NOTHING).sums, theirs(x[None])[0], dtype)
    assert torch.equal(x, given), "the input is left as it was"


def test_the_matrices_of_experts_are_views_that_cover_the_stacks() -> None:
    block = Experts(spec(True), cpu_context(4))
    experts = block.data
    experts.gate_up.fill_(-1)
    experts.down.fill_(-1)
    fills = dict(block.weights("mlp.experts"))
    assert len(fills) == 3 * 8
    for value, fill in enumerate(fills.values()):
        fill.place.fill_(value)
    assert experts.gate_up[:, 0, 0].tolist() == [3.0 * expert for expert in range(8)]
    assert experts.gate_up[:, 24, 0].tolist() == [3.0 * expert + 1 for expert in range(8)]
    assert experts.down[:, 0, 0].tolist() == [3.0 * expert + 2 for expert in range(8)]
    assert experts.gate_up.min() == 0
    assert experts.down.min() == 2
    assert list(fills)[3:6] == [
        "mlp.experts.1.gate_proj.weight",
        "mlp.experts.1.up_proj.weight",
        "mlp.experts.1.down_proj.weight",
    ]
