"""Experts beside a shared block: computed in one launch, or added where the next norm reads."""

from __future__ import annotations

import pytest
import torch

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.choice import kernels_for, reference_kernels
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.shared_moe import SharedExpertMLP
from manyroots.layers.spec import DenseSpec, ExpertsSpec, SharedSpec
from manyroots.layers.step import Step
from tests.unit.layers.contexts import cpu_context

HIDDEN = 32
NOTHING = Step(ropes=(), memories=(), lora=None)


def block(kernels: object, activation: Activation = Activation.SILU) -> SharedExpertMLP:
    experts = ExpertsSpec(
        num_experts=6, experts_per_token=2, intermediate_size=24, activation=Activation.SILU,
        scoring=Scoring.SOFTMAX,
    )  # fmt: skip
    shared = DenseSpec(intermediate_size=40, activation=activation, bias=False)
    context = cpu_context(HIDDEN, torch.float32, kernels=kernels)
    made = SharedExpertMLP(SharedSpec(experts=experts, shared=shared, gate=None), context)
    generator = torch.Generator().manual_seed(3)
    for weight in (
        made.sparse.experts.data.gate_up, made.sparse.experts.data.down,
        *(product.weight.data for product in made.products()),
    ):  # fmt: skip
        assert isinstance(weight, torch.Tensor)
        weight.normal_(std=0.3, generator=generator)
    return made


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize("num_tokens", [3, 20])
@torch.no_grad()
def test_f01_experts_and_the_shared_block_are_added_however_they_are_computed(
    num_tokens: int, activation: Activation
) -> None:
    """F01: few tokens in one launch, if the activations are alike; else as two addends."""
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    references = reference_kernels()
    ours = block(references, activation)(x, NOTHING)
    is_joined = num_tokens <= 16 and activation is Activation.SILU
    assert (ours.also is None) == is_joined
    assert ours.sums.shape[0] == (3 if is_joined else 2)
    apart = block(kernels_for(torch.device("cpu")), activation)
    shared, chosen = apart.shared(x, NOTHING), apart.sparse(x, NOTHING)
    kernels = apart._kernels
    expected = shared.finished(kernels) + chosen.finished(kernels)
    assert_close("lora", ours.finished(references), expected, torch.float32)
    assert_close("lora", apart(x, NOTHING).finished(kernels), expected, torch.float32)
    assert not torch.allclose(expected, chosen.finished(kernels), atol=0.01)
