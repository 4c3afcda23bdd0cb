"""Adapters that PEFT makes in less usual ways and saves: ours are the logits of what it has in
memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.ids import AdapterSlot
from manyroots.kernels.tolerances import assert_close
from tests.helpers.adapter_folders import rewrite_weights
from tests.unit.models.paged import PagedModel
from tests.unit.models.peft_models import ATTENTION, MLP, pool_for, read
from tests.unit.models.test_peft_parity import prompt
from tests.unit.models.tiny import load_tiny, save_tiny

pytestmark = pytest.mark.filterwarnings("ignore")

LINEAR = ATTENTION + MLP


def config(**options: Any) -> LoraConfig:
    usual = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": LINEAR}
    return LoraConfig(**{**usual, **options})


def train(model: Any) -> None:
    """As if."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter) * 0.1


def converted(**options: Any) -> Callable[[Any, Path], tuple[Any, Path]]:
    """Began by changing the base weights, and saved as a difference to those from before."""

    def make(base: Any, folder: Path) -> tuple[Any, Path]:
        model: Any = get_peft_model(base, config(**options))
        model.save_pretrained(folder / "start")
        train(model)
        trained = deepcopy(model)
        model.save_pretrained(folder, path_initial_model_for_weight_conversion=folder / "start")
        return trained, folder

    return make


def eva(base: Any, folder: Path) -> tuple[Any, Path]:
    """Ranks of modules come from data."""
    made = config(init_lora_weights="eva", eva_config=EvaConfig(rho=2.0))
    model: Any = get_peft_model(base, made)
    torch.manual_seed(0)
    data = [{"input_ids": torch.randint(0, 90, (2, 16))} for _ in range(8)]
    initialize_lora_eva_weights(model, data)
    train(model)
    model.save_pretrained(folder)
    assert model.peft_config["default"].rank_pattern
    return model, folder


def weighted(how: str, **options: Any) -> Callable[[Any, Path], tuple[Any, Path]]:
    """Made of two others, in a folder below."""

    def make(base: Any, folder: Path) -> tuple[Any, Path]:
        one = config(target_modules=["q_proj", "up_proj"], **options)
        model: Any = get_peft_model(base, one, adapter_name="one")
        other = {"lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], **options}
        if how != "linear":
            other |= {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 9}}
        model.add_adapter("two", config(**other))
        train(model)
        model.add_weighted_adapter(["one", "two"], [0.7, 0.4], "both", combination_type=how)
        model.set_adapter("both")
        model.save_pretrained(folder)
        return model, folder / "both"

    return make


def by_transformers(base: Any, folder: Path) -> tuple[Any, Path]:
    """Without PEFT's own class."""
    base.add_adapter(config(task_type=None))
    train(base)
    base.save_pretrained(folder)
    return base, folder


def without_head(base: Any, folder: Path) -> tuple[Any, Path]:
    """Of the model that gives hidden states, whose names have one part less; patterns go by
    them."""
    options = {"task_type": "FEATURE_EXTRACTION", "target_modules": [*LINEAR, "embed_tokens"]}
    anchored = {"^layers.1.mlp.up_proj": 30, "^layers.9.mlp.up_proj|^layers.0.*k_proj": 1}
    model: Any = get_peft_model(base.model, config(alpha_pattern=anchored, **options))
    train(model)
    model.save_pretrained(folder, save_embedding_layers=False)
    return base, folder


def by_expression(base: Any, folder: Path) -> tuple[Any, Path]:
    chosen = r"layers\.[01]\.(self_attn|mlp)\.\w+_proj"
    made = config(task_type="FEATURE_EXTRACTION", target_modules=chosen)
    model: Any = get_peft_model(base.model, made)
    train(model)
    model.save_pretrained(folder)
    return base, folder


FORMS: dict[str, Callable[[Any, Path], tuple[Any, Path]]] = {
    "pissa": converted(init_lora_weights="pissa"),
    "pissa, rank-stabilised": converted(init_lora_weights="pissa_niter_4", use_rslora=True),
    "pissa, patterns": converted(
        init_lora_weights="pissa", rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 3}
    ),
    "olora": converted(init_lora_weights="olora"),
    "eva": eva,
    **{how: weighted(how) for how in ("linear", "svd", "cat")},
    "cat, rank-stabilised": weighted("cat", use_rslora=True),
    "by transformers": by_transformers,
    "without a head": without_head,
    "without a head, by an expression": by_expression,
}


def compare(
    base: Any, model: Path, make: Callable[[Any, Path], tuple[Any, Path]], adapter: Path
) -> None:
    ours = load_tiny(model)
    tokens = prompt(1, 23)
    with torch.no_grad():
        before = base(input_ids=torch.tensor([tokens])).logits[0]
    theirs, folder = make(base, adapter)
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=torch.tensor([tokens])).logits[0]
    assert (wanted - before).abs().max() > 0.1, "it changes something"
    pool = pool_for(ours, num_slots=1)
    pool.load(AdapterSlot(0), read(folder, ours)[1])
    paged = PagedModel(ours, pool)
    paged.slot_of = {"a": 0}
    assert_close("logits", paged.step({"a": tokens})["a"], wanted, torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_w13_however_peft_makes_an_adapter_its_logits_are_ours(
    form: str, kind: str, tmp_path: Path
) -> None:
    """W13."""
    base = save_tiny(tmp_path / "base", kind)
    compare(base, tmp_path / "base", FORMS[form], tmp_path / "adapter")


@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("kind", ["llama-tied", "gemma3"])
def test_w14_a_head_that_has_the_embeddings_adapter_gives_pefts_logits(
    modules: list[str], kind: str, tmp_path: Path
) -> None:
    """W14: ensure_weight_tying, which PEFT asks for where a tied layer is adapted. Its config names
    the embedding alone; its file has both, and without the head's it is not whole."""

    def make(base: Any, folder: Path) -> tuple[Any, Path]:
        options = {"target_modules": [*modules, "q_proj"], "ensure_weight_tying": True}
        model: Any = get_peft_model(base, config(**options))
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += torch.randn_like(parameter) * 0.03
        model.save_pretrained(folder)
        return model, folder

    base = save_tiny(tmp_path / "base", kind)
    compare(base, tmp_path / "base", make, tmp_path / "adapter")

    def lose(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "lm_head.lora" in name]:
            del tensors[name]

    rewrite_weights(tmp_path / "adapter", lose)
    with pytest.raises(AdapterError, match=r"ensure_weight_tying is True .*not for lm_head"):
        read(tmp_path / "adapter", load_tiny(tmp_path / "base"))
