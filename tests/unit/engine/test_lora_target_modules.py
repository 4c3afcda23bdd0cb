"""`--lora-target-modules`: what adapters may change, where an operator says it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.config import LoraSettings
from manyroots.engine.adapter_runtime import slot_bytes
from manyroots.errors import ConfigError, ManyrootsError
from manyroots.store.adapter_sites import parts_named
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ASKED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and two adapters for it."""
    home = tmp_path_factory.mktemp(request.param)
    save_tiny(home / "model", request.param, vocab_size=300, eos_token_id=257)
    tiny_backend().save(str(home / "model" / "tokenizer.json"))
    targets = load_tiny(home / "model").adapter_targets()
    write_adapter(home / "attention", targets, Recipe(modules=("q_proj", "o_proj"), scale=1.0))
    write_adapter(home / "whole", targets, Recipe(modules=(*ATTENTION, "down_proj")))
    return home


def _ask(llm: LLM, home: Path, adapter: str | None) -> tuple[list[int], list[float]]:
    request = None if adapter is None else LoRARequest(adapter, lora_path=str(home / adapter))
    [answer] = llm.generate([PROMPT], ASKED, lora_request=request)
    output = answer.outputs[0]
    places = zip(output.logprobs or (), output.token_ids, strict=True)
    return output.token_ids, [place[token].logprob for place, token in places]


def test_answers_are_the_same_and_what_is_left_out_is_refused_by_name(folder: Path) -> None:
    settings = {"enable_lora": True, "max_model_len": 64, "num_gpu_blocks_override": 32}
    with LLM(str(folder / "model"), **settings) as every:
        expected = {name: _ask(every, folder, name) for name in (None, "attention")}
    assert expected[None][1] != expected["attention"][1], "the adapter changes nothing"
    with LLM(str(folder / "model"), lora_target_modules=("qkv_proj", "o_proj"), **settings) as llm:
        for name, (tokens, logprobs) in expected.items():
            found = _ask(llm, folder, name)
            assert found[0] == tokens
            torch.testing.assert_close(found[1], logprobs, atol=1e-4, rtol=1e-4)
        with pytest.raises(
            ManyrootsError, match=r"changes down_proj, which --lora-target-modules leaves"
        ):
            _ask(llm, folder, "whole")
        assert _ask(llm, folder, "attention")[0] == found[0], "others go on"


def test_products_are_taken_whole_and_experts_together(folder: Path) -> None:
    """A kernel has a place for each projection of its product, and one for experts has both of
    theirs: half of one would silently be none."""
    parts = load_tiny(folder / "model").lora_parts()

    def ends(*modules: str) -> set[str]:
        return {name.rpartition(".")[2] for name in parts_named(parts, modules)}

    assert ends("v_proj") == {"q_proj", "k_proj", "v_proj"}
    assert ends("self_attn.o_proj", "lm_head") == {"o_proj", "lm_head"}
    has_experts = any(".experts." in name for name in parts)
    mlp = {"gate_proj", "up_proj", "down_proj"}
    assert ends("down_proj") == (mlp if has_experts else {"down_proj"})
    assert ends("gate_up_proj") == (mlp if has_experts else mlp - {"down_proj"})
    assert parts_named(parts, ("q_proj", "all")) == parts_named(parts, ("all-linear",)) == parts
    with pytest.raises(ConfigError, match=r"names 'proj'.*it has embed_tokens, q_proj"):
        parts_named(parts, ("q_proj", "proj"))


def test_slots_are_as_small_as_what_they_may_hold(folder: Path) -> None:
    model = load_tiny(folder / "model")
    every, few = (
        slot_bytes(
            LoraSettings(enable_lora=True, lora_target_modules=modules), model, torch.float32
        )
        for modules in (("all",), ("o_proj",))
    )
    target = model.adapter_targets()["model.layers.0.self_attn.o_proj"]
    layers = sum(name.endswith("o_proj") for name in model.adapter_targets())
    assert few == layers * 16 * 4 * (target.in_features + target.out_features) < every


def test_it_wants_adapters_to_be_on() -> None:
    with pytest.raises(ConfigError, match="--lora-target-modules is given without --enable-lora"):
        LoraSettings(lora_target_modules=("q_proj",))
