"""Adapters on experts through the whole engine: tokens equal those of dense, merged models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from manyroots import LLM, LoRARequest, SamplingParams
from tests.helpers.adapter_folders import ExpertFormat, Recipe, write_adapter
from tests.unit.models.merged import merged
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

COUNT = 10
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43]
MODULES = ("q_proj", "gate_proj", "up_proj", "down_proj")
RECIPES = {
    **{
        form.value: Recipe(rank=2 + index, experts=form, modules=MODULES, seed=index)
        for index, form in enumerate(ExpertFormat)
    },
    "experts-alone": Recipe(rank=16, modules=MODULES[1:], experts=ExpertFormat.STACKED, seed=20),
    "attention-alone": Recipe(rank=3, modules=("q_proj", "v_proj"), seed=21),
    "router-too": Recipe(rank=4, alpha=30, modules=(*MODULES, "gate"), seed=22),
}


class Served:
    """A folder with `model` and one for each adapter, and what they must give."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        base: Any = save_tiny(
            folder / "model", "qwen3-moe-mixed", vocab_size=300, moe_intermediate_size=20
        )
        base.generation_config.eos_token_id = None
        tiny_backend().save(str(folder / "model" / "tokenizer.json"))
        targets = load_tiny(folder / "model").adapter_targets()
        self._dense = {None: base}
        self._known: dict[tuple[tuple[int, ...], str | None], list[int]] = {}
        for name, recipe in RECIPES.items():
            self._dense[name] = merged(base, write_adapter(folder / name, targets, recipe))

    def greedy(self, prompt: Sequence[int], adapter: str | None) -> list[int]:
        key = (tuple(prompt), adapter)
        if key not in self._known:
            self._known[key] = self._greedy(prompt, adapter)
        return self._known[key]

    def _greedy(self, prompt: Sequence[int], adapter: str | None) -> list[int]:
        ids = torch.tensor([list(prompt)])
        output = self._dense[adapter].generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=COUNT, pad_token_id=0,
        )  # fmt: skip
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, 1, str(self.folder / name))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


def start(served: Served, **settings: Any) -> LLM:
    given = {"enable_lora": True, "dtype": "float32", "block_size": 4, **settings}
    return LLM(str(served.folder / "model"), num_gpu_blocks_override=256, **given)


def tokens(llm: LLM, prompts: list[list[int]], adapters: Any) -> list[list[int]]:
    results = llm.generate(prompts, GREEDY, lora_request=adapters)
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("max_loras", [3, 8])
def test_nine_adapters_on_experts_and_the_base_together_give_the_tokens_of_each_alone_w15_w17(
    served: Served, max_loras: int
) -> None:
    """W15, W17: every file format; in chunks; slots rotate; the second time from the cache."""
    names = [None, *RECIPES, None, *reversed(RECIPES)]
    prompts = [PROMPT if index % 3 else PROMPT[: 5 + index % 4] for index in range(len(names))]
    wanted = [served.greedy(p, name) for p, name in zip(prompts, names, strict=True)]
    assert len({tuple(served.greedy(PROMPT, name)) for name in [None, *RECIPES]}) == 10
    with start(served, max_loras=max_loras, long_prefill_token_threshold=5) as llm:
        for _ in range(2):
            assert tokens(llm, prompts, [served.request(name) for name in names]) == wanted
        assert llm.stats().total_hit_tokens > 0
        assert llm.stats().num_held_pages == 0


def test_each_format_alone_w15(served: Served) -> None:
    """W15: one request at a time."""
    with start(served, max_loras=1) as llm:
        for name in [*RECIPES, None]:
            assert tokens(llm, [PROMPT], served.request(name)) == [served.greedy(PROMPT, name)]


def test_loading_names_the_projections_of_experts(served: Served) -> None:
    with start(served) as llm:
        reply = llm.load_adapter("it", str(served.folder / "experts-alone"))
        assert (reply.rank, set(reply.modules)) == (16, {"gate_proj", "up_proj", "down_proj"})
