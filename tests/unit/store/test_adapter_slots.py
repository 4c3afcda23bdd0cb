"""Device slots: what is in one is its owner's whole adapter and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.ids import AdapterSlot
from manyroots.models.decoder import Decoder
from manyroots.store.adapter_slots import AdapterSlots
from manyroots.store.adapter_weights import AdapterWeights
from tests.unit.host_copies import host_copy, random_adapter
from tests.unit.models.tiny import load_tiny, save_tiny

CPU = torch.device("cpu")
SLOT = AdapterSlot(0)
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return load_tiny(folder)


def make_slots(model: Decoder, dtype: torch.dtype = torch.float32) -> AdapterSlots:
    return AdapterSlots(model.lora_parts(), dtype=dtype, device=CPU)


def adapter(model: Decoder, ranks: dict[str, int], seed: int = 0) -> AdapterWeights:
    named = {f"{ATTENTION}.{name}": rank for name, rank in ranks.items()}
    return random_adapter(model.adapter_targets(), named, seed=seed, scaling=0.5)


def delta(model: Decoder, slots: AdapterSlots, site: str, x: Tensor) -> Tensor:
    """What the adapter in SLOT adds to a product of layer 0."""
    linear = getattr(model.layers[0].attention, site)
    batch = slots.batch(np.zeros(len(x), np.int64), all_layers=True)
    return linear(x, batch) - linear(x, None)


def test_a_reused_slot_shows_nothing_of_its_last_owner_w09(model: Decoder) -> None:
    """W09: X (q, k, v, o) then Y (q alone) in the same slot: what Y adds to o is exactly 0."""
    slots, fresh = make_slots(model), make_slots(model)
    torch.manual_seed(0)
    x = torch.randn(3, 48)
    slots.load(SLOT, adapter(model, dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], 8)))
    assert delta(model, slots, "o", x).abs().max() > 0
    y = adapter(model, {"q_proj": 4}, seed=1)
    slots.load(SLOT, y)
    fresh.load(SLOT, y)
    assert torch.equal(delta(model, slots, "o", x), torch.zeros(3, 48))
    mine, alone = delta(model, slots, "qkv", x), delta(model, fresh, "qkv", x)
    assert torch.equal(mine, alone)
    assert mine[:, :48].abs().max() > 0
    assert torch.equal(mine[:, 48:], torch.zeros_like(mine[:, 48:]))


def test_a_reused_slot_shows_nothing_in_stacks_either_w09(model: Decoder) -> None:
    """W09: as above, for adapters that are computed together."""
    slots = make_slots(model)
    torch.manual_seed(0)
    x, rows = torch.randn(4, 48), np.array([0, 0, 1, 1])
    site = model.layers[0].attention.o
    slots.load(SLOT, adapter(model, {"q_proj": 4, "o_proj": 4}))
    slots.load(AdapterSlot(1), adapter(model, {"o_proj": 4}, seed=2))
    for _ in range(3):
        before = site(x, slots.batch(rows, all_layers=True))
    slots.load(SLOT, adapter(model, {"q_proj": 4}, seed=1))
    for _ in range(3):
        batch = slots.batch(rows, all_layers=True)
        after = site(x, batch)
    assert batch is not None
    assert batch.group is not None
    assert torch.equal(after[:2], site(x, None)[:2])
    assert torch.equal(after[2:], before[2:])


def test_a_cleared_slot_is_empty_and_an_empty_slot_computes_nothing(model: Decoder) -> None:
    slots = make_slots(model)
    slots.load(SLOT, adapter(model, {"q_proj": 4}))
    assert slots.num_bytes > 0
    slots.clear(SLOT)
    slots.clear(SLOT)
    assert slots.num_bytes == 0
    with pytest.raises(RuntimeError, match="slot 0, which is empty"):
        slots.batch(np.array([0]), all_layers=True)


def test_a_slot_takes_the_memory_of_its_adapters_own_ranks(model: Decoder) -> None:
    slots = make_slots(model)
    slots.load(SLOT, adapter(model, {"q_proj": 16}))
    slots.load(AdapterSlot(1), adapter(model, {"k_proj": 16}, seed=1))
    assert slots.num_bytes == 16 * (48 + 48) * 4 + 16 * (48 + 16) * 4


def test_weights_that_are_not_finite_in_the_engines_arithmetic_are_refused(model: Decoder) -> None:
    slots = make_slots(model, torch.float16)
    target = f"{ATTENTION}.q_proj"
    weights = host_copy(
        {target: (torch.ones(2, 48).half(), torch.full((48, 2), 6e4).half(), 2.0)}, "huge"
    )
    with pytest.raises(AdapterError, match="not all finite"):
        slots.load(SLOT, weights)
    with pytest.raises(RuntimeError, match="empty"):
        slots.batch(np.array([0]), all_layers=True)


def test_targets_of_another_model_are_refused(model: Decoder) -> None:
    weights = host_copy({"model.layers.9.mlp.up": (torch.ones(1, 2), torch.ones(3, 1), 1.0)}, "x")
    with pytest.raises(RuntimeError, match=r"model\.layers\.9"):
        make_slots(model).load(SLOT, weights)
