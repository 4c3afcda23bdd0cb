"""A block of experts with an adapter equals the block whose weights have it merged."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.choice import kernels_for
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.moe import SparseMLP
from manyroots.layers.spec import ExpertsSpec
from manyroots.layers.step import Step
from manyroots.store.adapter_pool import AdapterPool
from tests.unit.host_copies import host_copy
from tests.unit.layers.contexts import cpu_context

CPU = torch.device("cpu")
HIDDEN, INNER, NUM_EXPERTS = 32, 20, 6
SPEC = ExpertsSpec(
    num_experts=NUM_EXPERTS,
    experts_per_token=3,
    intermediate_size=INNER,
    activation=Activation.SILU,
    scoring=Scoring.SOFTMAX_RENORMALISED,
)
SIZES = {
    "gate_proj": (HIDDEN, INNER),
    "up_proj": (HIDDEN, INNER),
    "down_proj": (INNER, HIDDEN),
}

Pairs = dict[str, tuple[Tensor, Tensor, float]]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def block(dtype: torch.dtype = torch.float32) -> SparseMLP:
    made = SparseMLP(SPEC, cpu_context(HIDDEN, dtype))
    stack = made.experts.data
    weights = (made.router.weight.data, stack.gate_up, stack.down)
    for seed, weight in enumerate(weights):
        weight.copy_(draw(seed, *weight.shape))
    return made


def random_pairs(names: list[str], shared: set[str], seed: int = 7) -> Pairs:
    """`shared`: halves that all experts have in common, as `up_proj A`."""
    pairs: Pairs = {}
    for number, name in enumerate(names):
        (num_in, num_out), rank = SIZES[name], 2 + number

        def half(side: str, *shape: int, name: str = name) -> Tensor:
            count = 1 if f"{name} {side}" in shared else NUM_EXPERTS
            return draw(seed + ord(side) + len(name), count, *shape)

        pairs[f"mlp.experts.{name}"] = half("A", rank, num_in), half("B", num_out, rank), 1.5
    return pairs


def merged(pairs: Pairs) -> SparseMLP:
    made = block()
    gate, up = made.experts.data.gate_up.split(INNER, dim=1)
    weights = {"gate_proj": gate, "up_proj": up, "down_proj": made.experts.data.down}
    for name, (a, b, scaling) in pairs.items():
        weights[name.rpartition(".")[2]].add_(scaling * (b @ a))
    return made


def loaded(made: SparseMLP, adapters: list[Pairs], dtype: torch.dtype) -> AdapterPool:
    parts = dict(made.lora_parts("mlp"))
    pool = AdapterPool(parts, num_slots=len(adapters), max_rank=8, dtype=dtype, device=CPU)
    made.router.pooled = pool.sites[made.router.site]
    experts = made.experts
    made.pooled = (pool.expert_sites[experts.gate_up_site], pool.expert_sites[experts.down_site])
    for slot, pairs in enumerate(adapters):
        cast = {name: (a.to(dtype), b.to(dtype), scale) for name, (a, b, scale) in pairs.items()}
        pool.load(AdapterSlot(slot), host_copy(cast, str(slot)))
    return pool


def compute(
    made: SparseMLP, x: Tensor, pool: AdapterPool | None = None, slots: Any = None
) -> Tensor:
    lora = None
    if pool is not None:
        lora = kernels_for(CPU).lora_ops.prepare(np.asarray(slots, np.int64), pool, CPU)
    return made(x, Step(ropes=(), memories=(), lora=lora)).sums


HALVES = [f"{name} {side}" for name in SIZES for side in "AB"]


@pytest.mark.parametrize("choice", list(product([False, True], repeat=len(HALVES))))
def test_whichever_halves_experts_share_the_block_equals_the_merged_one_w15(
    choice: tuple[bool, ...],
) -> None:
    """W15: either side of each projection shared by all experts, or one per expert."""
    shared = {half for half, is_shared in zip(HALVES, choice, strict=True) if is_shared}
    pairs, made = random_pairs(list(SIZES), shared), block()
    slots = loaded(made, [pairs], torch.float32)
    token_slots = np.array([-1, 0, 0, 0, -1, 0, *[0] * 20])
    x = draw(11, len(token_slots), HIDDEN) * 5
    out = compute(made, x, slots, token_slots)
    base, wanted = compute(made, x), compute(merged(pairs), x)
    is_base = torch.from_numpy(token_slots == -1)
    assert_close("expert_lora", out[~is_base], wanted[~is_base], torch.float32)
    assert torch.equal(out[is_base], base[is_base])
    assert (wanted - base).abs().amax(dim=1).min() > 0.01


@pytest.mark.parametrize(
    "names", [["gate_proj"], ["up_proj"], ["down_proj"], ["up_proj", "down_proj"]]
)
def test_an_adapter_may_change_some_projections_only_w14(names: list[str]) -> None:
    """W14: the others are the base model's."""
    pairs, made = random_pairs(names, {"up_proj A"}), block()
    x = draw(12, 9, HIDDEN) * 5
    out = compute(made, x, loaded(made, [pairs], torch.float32), np.zeros(9))
    assert_close("expert_lora", out, compute(merged(pairs), x), torch.float32)


def test_adapters_side_by_side_in_bfloat16_are_the_same_as_each_alone_w17() -> None:
    """W17: several adapters and the base in one step."""
    made, dtype = block(torch.bfloat16), torch.bfloat16
    shared: list[set[str]] = [set(), {"gate_proj A", "up_proj A", "down_proj B"}, set(HALVES)]
    adapters = [random_pairs(list(SIZES), halves, 7 + 9 * n) for n, halves in enumerate(shared)]
    slots = loaded(made, adapters, dtype)
    token_slots = np.array([-1, 0, 1, 2, 2, 0, 1, 1, -1, 2])
    x = (draw(13, 10, HIDDEN) * 5).to(dtype)
    together = compute(made, x, slots, token_slots)
    for slot in (-1, 0, 1, 2):
        rows = torch.from_numpy(token_slots == slot)
        alone = compute(made, x[rows], slots, token_slots[token_slots == slot])
        assert_close("expert_lora", together[rows], alone, dtype)
