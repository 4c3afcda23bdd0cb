"""Logits equal transformers', however the tokens are cut into steps and pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyroots.kernels.tolerances import assert_close
from tests.unit.models.paged import PagedModel
from tests.unit.models.tiny import MODELS, load_tiny, save_tiny

LENGTHS = {"a": 41, "b": 7, "c": 23, "d": 7}


def prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(0, 97, (length,), generator=generator).tolist()
        for name, length in LENGTHS.items()
    }


@torch.no_grad()
def expected(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("kind", MODELS)
def test_prefill_chunks_and_decode_give_transformers_logits(kind: str, tmp_path: Path) -> None:
    """F01."""
    theirs = save_tiny(tmp_path, kind)
    ours = load_tiny(tmp_path)
    wanted = {name: expected(theirs, tokens) for name, tokens in prompts().items()}

    whole = PagedModel(ours).step(prompts())
    for name, logits in whole.items():
        assert_close("logits", logits, wanted[name], torch.float32)

    for chunk in (1, 5, 16):
        paged = PagedModel(ours)
        rest = prompts()
        got: dict[str, list[Tensor]] = {name: [] for name in rest}
        # Sequences of different lengths run out at different times, so that prefills of several
        # sizes and decodes share steps.
        while rest:
            now = {name: tokens[:chunk] for name, tokens in rest.items()}
            for name, logits in paged.step(now).items():
                got[name].append(logits)
            rest = {name: left for name, tokens in rest.items() if (left := tokens[chunk:])}
        for name, parts in got.items():
            assert_close("logits", torch.cat(parts), wanted[name], torch.float32)


def test_decodes_and_prefills_mixed_in_one_step_do_not_disturb_each_other(tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path)
    paged = PagedModel(load_tiny(tmp_path), page_size=8)
    tokens = prompts()
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    paged.step({"b": tokens["b"][:6], "a": tokens["a"][:30]})
    mixed = paged.step({"b": tokens["b"][6:], "c": tokens["c"], "a": tokens["a"][30:31]})
    assert_close("logits", mixed["b"], wanted["b"][6:], torch.float32)
    assert_close("logits", mixed["c"], wanted["c"], torch.float32)
    assert_close("logits", mixed["a"], wanted["a"][30:31], torch.float32)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "qwen3-moe"])
def test_bfloat16_stays_near_float32(kind: str, tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path, kind, initializer_range=0.05)
    paged = PagedModel(load_tiny(tmp_path, torch.bfloat16), page_size=16)
    tokens = prompts()["a"]
    prefill = paged.step({"a": tokens[:37]})["a"]
    decoded = [paged.step({"a": [token]})["a"] for token in tokens[37:]]
    wanted = expected(theirs, tokens)
    assert_close("logits", torch.cat([prefill, *decoded]), wanted, torch.bfloat16)
