"""Adapters that change a mixture's router, as PEFT's `all-linear` does: logits are PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.kernels.tolerances import assert_close
from tests.helpers.adapter_folders import Recipe, rewrite_config, write_adapter
from tests.unit.models.paged import PagedModel
from tests.unit.models.peft_models import make_pair, pool_for, read
from tests.unit.models.test_moe_adapters import INTERMEDIATE, KINDS, Served
from tests.unit.models.test_peft_parity import prompt
from tests.unit.models.test_peft_parity import run as run_with_peft
from tests.unit.models.tiny import load_tiny, save_tiny

pytestmark = pytest.mark.filterwarnings("ignore")

ROUTER: dict[str, dict[str, Any]] = {
    "all linear": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    "all linear, again": {
        "r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear",
    },
    "wide": {
        "r": 4, "lora_alpha": 8, "target_modules": "all-linear",
        "rank_pattern": {"gate.weight": 12}, "alpha_pattern": {r".*mlp\.gate\..eight": 60},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "gate"]},
        {"target_modules": r".*\.gate"},
        {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
    ],
)
def test_however_peft_is_told_to_change_the_router_its_logits_are_ours_w14(
    options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """W14: whatever PEFT calls it, and with dense layers in between."""
    adapters = {"it": {"r": 6, "lora_alpha": 30, **options}}
    pair = make_pair(tmp_path, kind, adapters, moe_intermediate_size=INTERMEDIATE)
    assert "model.layers.2.mlp.gate" in read(tmp_path / "it", pair.ours)[1].pairs
    run_with_peft(pair, {"a": ("it", prompt(1, 19)), "b": (None, prompt(2, 8))}, chunk=None)
    base = pair.expected(None, prompt(1, 19))
    assert (pair.expected("it", prompt(1, 19)) - base).abs().max() > 0.1


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_all_linear_adapters_and_the_base_in_one_batch_give_pefts_logits_w17(
    chunk: int | None, tmp_path: Path
) -> None:
    """W17: several ranks and scalings of the router, and the base, in prefills and decodes."""
    pair = make_pair(tmp_path, "qwen3-moe", ROUTER, moe_intermediate_size=INTERMEDIATE)
    requests: dict[str, tuple[str | None, list[int]]] = {
        "base": (None, prompt(50, 9)), "base too": (None, prompt(51, 17))
    }  # fmt: skip
    for index, name in enumerate(ROUTER):
        requests[name] = (name, prompt(index, 5 + 3 * index))
        requests[f"{name}, again"] = (name, prompt(20 + index, 12))
    run_with_peft(pair, requests, chunk)


RECIPES = {
    "router-alone": Recipe(rank=4, alpha=40, modules=("gate",), seed=1),
    "router-and-experts": Recipe(rank=3, modules=("gate", "up_proj", "down_proj"), seed=2),
    "experts-alone": Recipe(rank=5, modules=("gate_proj", "down_proj"), seed=3),
    "attention-alone": Recipe(rank=3, modules=("q_proj",), seed=4),
    "everything": Recipe(rank=8, alpha=4, seed=5),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 1])
def test_adapters_with_and_without_a_router_in_one_batch_equal_merged_models_w17(
    chunk: int | None, kind: str, tmp_path: Path
) -> None:
    """W17: rows of one batch route by weights of their own."""
    served = Served(tmp_path, kind, RECIPES)
    requests: dict[str, tuple[str | None, list[int]]] = {"base": (None, prompt(50, 9))}
    for index, name in enumerate(RECIPES):
        requests[name] = (name, prompt(index, 7 + index))
    for name, logits in served.run(requests, chunk).items():
        assert_close("logits", logits, served.expected(*requests[name]), torch.float32)
    base = served.expected(None, prompt(1, 9))
    for name in RECIPES:
        assert (served.expected(name, prompt(1, 9)) - base).abs().max() > 1e-2, name


@torch.no_grad()
def test_an_all_linear_adapter_of_transformers_4_gives_the_logits_that_peft_makes_of_it_w15(
    tmp_path: Path,
) -> None:
    """W15: one pair per expert and one of the router, all called linear then; PEFT converts."""
    base = save_tiny(tmp_path / "base", "qwen3-moe", moe_intermediate_size=INTERMEDIATE)
    ours = load_tiny(tmp_path / "base")
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj")
    targets = ours.adapter_targets()
    write_adapter(tmp_path / "it", targets, Recipe(rank=3, alpha=9, modules=linear, scale=0.1))
    names = json.loads((tmp_path / "it" / "adapter_config.json").read_text())["target_modules"]
    assert set(names) == set(linear)
    pool = pool_for(ours, num_slots=1)
    pool.load(AdapterSlot(0), read(tmp_path / "it", ours)[1])
    paged = PagedModel(ours, pool)
    paged.slot_of = {"a": 0}
    tokens = prompt(3, 21)
    got: Tensor = paged.step({"a": tokens})["a"]
    wanted = base(input_ids=torch.tensor([tokens])).logits[0]
    assert (got - wanted).abs().max() > 0.1
    rewrite_config(tmp_path / "it", lora_dropout=0.0)  # which PEFT's wrapped parameters refuse
    theirs = PeftModel.from_pretrained(base, tmp_path / "it").eval()
    wanted = theirs(input_ids=torch.tensor([tokens])).logits[0]
    assert_close("logits", got, wanted, torch.float32)
