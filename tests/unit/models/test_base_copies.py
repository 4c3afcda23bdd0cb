"""PEFT saves embedding and head beside adapters that change them, and uses what it saved. Where
that is not what the model has, an adapter is refused: we use the model's own."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from manyroots.config import LoraSettings
from manyroots.engine.adapter_runtime import build_adapter_runtime
from manyroots.errors import AdapterError
from manyroots.ids import AdapterSlot
from manyroots.kernels.tolerances import assert_close
from manyroots.models.decoder import Decoder
from manyroots.store.adapter_base import BaseRows, check_copy
from tests.helpers.adapter_folders import rewrite_weights
from tests.unit.models.paged import PagedModel
from tests.unit.models.tiny import load_tiny, save_tiny

pytestmark = pytest.mark.filterwarnings("ignore")

COPIES = {
    "embed_tokens": "base_model.model.model.embed_tokens.base_layer.weight",
    "lm_head": "base_model.model.lm_head.base_layer.weight",
}
TOKENS = [1, 95, 2, 90, 93, 7]


def served(ours: Decoder, folder: Path) -> PagedModel:
    """As an engine opens and loads an adapter."""
    runtime = build_adapter_runtime(
        LoraSettings(enable_lora=True), ours, ours.dtype, ours.device, room=1, max_num_seqs=4
    )
    _, weights = runtime.files.read(folder, None)
    runtime.loader.pool.load(AdapterSlot(0), weights)
    paged = PagedModel(ours, runtime.loader.pool)
    paged.slot_of = {"a": 0}
    return paged


def save_adapter(base: Any, folder: Path, module: str) -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {
        "r": 4,
        "target_modules": ["q_proj", module],
        "init_lora_weights": False,
    }
    adapted: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    adapted.save_pretrained(folder)


@pytest.mark.parametrize("module", COPIES)
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_w12_base_weights_that_are_not_the_models_are_refused_by_their_tokens(
    kind: str, module: str, tmp_path: Path
) -> None:
    """W12: of tokens that were added where the vocabulary had room, or trained."""
    base = save_tiny(tmp_path / "base", kind)
    ours = load_tiny(tmp_path / "base")
    trained = deepcopy(base)
    with torch.no_grad():
        for layer in (trained.get_input_embeddings(), trained.get_output_embeddings()):
            layer.weight[[90, 95]] += layer.weight[[3, 4]]
    save_adapter(trained, tmp_path / "a", module)
    with pytest.raises(AdapterError, match=rf"{module}.base_layer.weight'.*tokens 90, 95: .*added"):
        served(ours, tmp_path / "a")


@torch.no_grad()
@pytest.mark.parametrize("module", COPIES)
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_w14_the_models_own_base_weights_may_be_repeated_in_any_dtype(
    kind: str, module: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """W14."""
    base = save_tiny(tmp_path / "base", kind)
    ours = load_tiny(tmp_path / "base")
    save_adapter(deepcopy(base), tmp_path / "a", module)

    def round_off(tensors: dict[str, Tensor]) -> None:
        tensors[COPIES[module]] = tensors[COPIES[module]].to(dtype)

    rewrite_weights(tmp_path / "a", round_off)
    got = served(ours, tmp_path / "a").step({"a": TOKENS})["a"]
    if dtype is torch.float32:
        theirs = PeftModel.from_pretrained(base, tmp_path / "a").eval()
        wanted = theirs(input_ids=torch.tensor([TOKENS])).logits[0]
        assert_close("logits", got, wanted, torch.float32)


def test_w12_a_rank_looks_at_its_own_rows() -> None:
    """W12: of the head, of which it has no others."""
    torch.manual_seed(0)
    whole = torch.randn(40, 8)
    copy = whole.clone()
    copy[33] *= 2
    check_copy("it", copy, BaseRows(whole[:20], 0))
    with pytest.raises(AdapterError, match="tokens 33:"):
        check_copy("it", copy, BaseRows(whole[20:], 20))


def test_w12_what_quantization_rounds_off_is_no_change_and_another_model_is() -> None:
    """W12: a quantized model's rows differ all alike, by much less than rows of other models."""
    torch.manual_seed(0)
    copy = torch.randn(40, 64)
    copy[39] = 0.0
    noise = torch.randn_like(copy) * 0.1
    noise[39] = 0.0
    check_copy("it", copy, BaseRows(copy + noise, 0))
    trained = copy + noise
    trained[7] += torch.randn(64) * 0.6
    with pytest.raises(AdapterError, match="tokens 7:"):
        check_copy("it", copy, BaseRows(trained, 0))
    for other in (torch.randn(40, 64), torch.full((40, 64), torch.nan)):
        with pytest.raises(AdapterError, match="not those of this model"):
            check_copy("it", other, BaseRows(copy, 0))
