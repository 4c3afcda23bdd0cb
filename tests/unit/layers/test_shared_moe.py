"""Experts beside a shared block: computed in one launch, or added where the next norm reads."""

from __future__ import annotations

import pytest
import torch

from manyroots.ids import AdapterDigest, AdapterSlot
from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.choice import kernels_for, reference_kernels
from manyroots.kernels.fused_moe import reference as fused_moe
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.shared_moe import SharedExpertMLP
from manyroots.layers.spec import DenseSpec, ExpertsSpec, SharedSpec
from manyroots.layers.step import Step
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_weights import AdapterWeights, LoraPair
from tests.unit.layers.contexts import CPU, cpu_context

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


@pytest.mark.parametrize("limited_to", ["all", "experts", "shared"])
@torch.no_grad()
def test_f07_adapters_of_both_are_added_however_they_are_computed(
    limited_to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F07: in one launch, if adapters may change both; else as two addends."""
    made = block(reference_kernels())
    parts = {
        name: part
        for name, part in made.lora_parts("m")
        if limited_to in ("all", "experts" if ".experts." in name else "shared")
    }
    pool = AdapterPool(
        parts, num_slots=1, max_rank=8, dtype=torch.float32, device=CPU, is_transposed=False
    )
    generator = torch.Generator().manual_seed(4)
    halves = []
    for part in parts.values():
        stack = () if part.site.num_experts is None else (part.site.num_experts,)
        size = part.columns.stop - part.columns.start
        halves += [
            torch.randn(*stack, *shape, generator=generator) * 0.2
            for shape in ((8, part.site.in_features), (size, 8))
        ]
    flat = torch.cat([half.flatten() for half in halves])
    pieces = torch.split(flat, [half.numel() for half in halves])
    views = [one.view(half.shape) for one, half in zip(pieces, halves, strict=True)]
    pairs = {
        name: LoraPair(a, b, 0.5) for name, a, b in zip(parts, views[::2], views[1::2], strict=True)
    }
    pool.load(AdapterSlot(0), AdapterWeights(AdapterDigest(b""), pairs, flat))
    for product in made.products():
        product.pooled = pool.sites.get(product.site)
    experts = made.sparse.experts
    if experts.gate_up_site in pool.expert_sites:
        made.sparse.pooled = tuple(
            pool.expert_sites[site] for site in (experts.gate_up_site, experts.down_site)
        )  # type: ignore[assignment]
    x = torch.randn(5, HIDDEN, generator=generator)
    step = Step(ropes=(), memories=(), lora=LoraRows.build([-1, 0, 0, -1, 0], CPU))
    ours = made(x, step)
    assert (ours.also is None) == (limited_to == "all")
    monkeypatch.setattr(fused_moe, "MOST_JOINED_TOKENS", 0)
    apart = made(x, step)
    assert apart.also is not None
    kernels = reference_kernels()
    expected = apart.finished(kernels)
    assert_close("lora", ours.finished(kernels), expected, torch.float32)
    base = made(x, NOTHING).finished(kernels)
    changed = (expected - base).abs().amax(dim=1) > 1e-3
    assert changed.tolist() == [False, True, True, False, True]
