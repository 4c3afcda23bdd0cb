"""A block of experts with an adapter equals the block whose weights have it merged."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.moe import ExpertsSpec, SparseMLP
from manyroots.store.adapter_slots import AdapterSlots
from tests.unit.host_copies import host_copy

CPU = torch.device("cpu")
HIDDEN, INNER, NUM_EXPERTS = 32, 20, 6
SPEC = ExpertsSpec(
    num_experts=NUM_EXPERTS, experts_per_token=3, intermediate_size=INNER, norm_topk_prob=True
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
    made = SparseMLP(HIDDEN, SPEC, activation="silu", dtype=dtype, device=CPU)
    weights = (made.router.scores.weight, made.experts.gate_up, made.experts.down)
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
    gate, up = made.experts.gate_up.split(INNER, dim=1)
    weights = {"gate_proj": gate, "up_proj": up, "down_proj": made.experts.down}
    for name, (a, b, scaling) in pairs.items():
        weights[name.rpartition(".")[2]].add_(scaling * (b @ a))
    return made


def loaded(made: SparseMLP, adapters: list[Pairs], dtype: torch.dtype) -> AdapterSlots:
    slots = AdapterSlots(dict(made.lora_parts("mlp")), dtype=dtype, device=CPU)
    for slot, pairs in enumerate(adapters):
        cast = {name: (a.to(dtype), b.to(dtype), scale) for name, (a, b, scale) in pairs.items()}
        slots.load(AdapterSlot(slot), host_copy(cast, str(slot)))
    return slots


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
    out = made(x, slots.batch(token_slots, all_layers=True))
    base, wanted = made(x, None), merged(pairs)(x, None)
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
    batch = loaded(made, [pairs], torch.float32).batch(np.zeros(9, np.int64), all_layers=True)
    assert_close("expert_lora", made(x, batch), merged(pairs)(x, None), torch.float32)


def test_adapters_side_by_side_in_bfloat16_are_the_same_as_each_alone_w17() -> None:
    """W17: several adapters and the base in one step."""
    made, dtype = block(torch.bfloat16), torch.bfloat16
    shared: list[set[str]] = [set(), {"gate_proj A", "up_proj A", "down_proj B"}, set(HALVES)]
    adapters = [random_pairs(list(SIZES), halves, 7 + 9 * n) for n, halves in enumerate(shared)]
    slots = loaded(made, adapters, dtype)
    token_slots = np.array([-1, 0, 1, 2, 2, 0, 1, 1, -1, 2])
    x = (draw(13, 10, HIDDEN) * 5).to(dtype)
    together = made(x, slots.batch(token_slots, all_layers=True))
    for slot in (-1, 0, 1, 2):
        rows = torch.from_numpy(token_slots == slot)
        alone = made(x[rows], slots.batch(token_slots[token_slots == slot], all_layers=True))
        assert_close("expert_lora", together[rows], alone, dtype)


def test_what_experts_share_is_in_memory_once() -> None:
    made = block()
    shared = {"gate_proj A", "up_proj A", "down_proj B"}
    slots = loaded(made, [random_pairs(list(SIZES), shared)], torch.float32)
    ranks = {"gate_proj": 2, "up_proj": 3, "down_proj": 4}
    once = (ranks["gate_proj"] + ranks["up_proj"] + ranks["down_proj"]) * HIDDEN
    each = (ranks["gate_proj"] + ranks["up_proj"] + ranks["down_proj"]) * INNER
    num_bytes = (once + NUM_EXPERTS * each) * 4
    rounding = 6 * 64
    assert num_bytes <= slots.num_bytes <= num_bytes + rounding
