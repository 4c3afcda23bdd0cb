"""Adapters handed over from memory in Python (A05)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.errors import RequestError
from tests.helpers.tiny_adapters import RECIPES, TinyAdapters

PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(tiny: TinyAdapters, tmp_path: Path) -> LLM:
    return LLM(
        str(tiny.model), enable_lora=True, max_loras=1, max_cpu_loras=1, dtype="float32",
        num_gpu_blocks_override=256, block_size=4, lora_cache_dir=str(tmp_path),
    )  # fmt: skip


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def answer(llm: LLM, model: str) -> tuple[list[int], str | None]:
    [result] = llm.generate([PROMPT], GREEDY, lora_request=LoRARequest(model))
    return result.outputs[0].token_ids, result.outputs[0].adapter_revision


def test_a05_tensors_in_memory_are_served_and_equal_their_files(
    llm: LLM, tiny: TinyAdapters
) -> None:
    for number in range(6):
        folder = tiny.write(f"step{number}", replace(RECIPES["all"], seed=60 + number))
        tensors = tensors_of(folder)
        reply = llm.publish_adapter("policy", tensors, PeftConfig.from_pretrained(str(folder)))
        for tensor in tensors.values():
            tensor.zero_()  # the caller trains on
        said, revision = answer(llm, "policy")
        assert said == tiny.greedy(PROMPT, f"step{number}", 8)
        assert revision == reply.digest[:12]
    # Another adapter takes its slot and its host copy: it comes back from disk, unchanged.
    llm.load_adapter("other", tiny.path("other"))
    assert answer(llm, "other")[0] == tiny.greedy(PROMPT, "other", 8)
    assert answer(llm, "policy")[0] == tiny.greedy(PROMPT, "step5", 8)
    # A new engine is told of it, too.
    llm.sleep()
    llm.wake_up()
    assert answer(llm, "policy")[0] == tiny.greedy(PROMPT, "step5", 8)
    llm.close()


def test_a05_what_is_no_adapter_in_memory_is_refused(llm: LLM, tiny: TinyAdapters) -> None:
    folder = Path(tiny.path("few"))
    config = PeftConfig.from_pretrained(str(folder))
    llm.publish_adapter("policy", tensors_of(folder), config)
    broken = {name: tensor.double() for name, tensor in tensors_of(folder).items()}
    with pytest.raises(RequestError, match="float64"):
        llm.publish_adapter("policy", broken, config)
    with pytest.raises(RequestError, match="config is a str"):
        llm.publish_adapter("policy", tensors_of(folder), "lora")
    with pytest.raises(RequestError):
        llm.publish_adapter("policy", dict(list(tensors_of(folder).items())[:1]), config)
    assert answer(llm, "policy")[0] == tiny.greedy(PROMPT, "few", 8)
    llm.close()
