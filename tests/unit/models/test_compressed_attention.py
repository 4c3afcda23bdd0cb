"""Compressed groups (DeepSeek V4): what is computed, what it takes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.choice import reference_kernels
from manyroots.models.families import check_page_size, with_pages_in
from tests.helpers.seeded import Draw
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_logits_parity import assert_logits, expected, in_steps, prompts
from tests.unit.models.tiny import load_tiny, save_tiny, tiny_spec

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
PUBLISHED = {SPARSE: 4, HEAVY: 128}
"""Groups of the published models."""


@pytest.mark.parametrize("rates", [{SPARSE: 2, HEAVY: 4}, {SPARSE: 8, HEAVY: 1}], ids=str)
def test_f10_groups_cut_at_random_give_transformers_logits(
    rates: dict[str, int], tmp_path: Path
) -> None:
    """F10: chunks of all lengths and decodes share steps; pages that windows have left are gone."""
    theirs, ours = save_tiny(tmp_path, "deepseek-v4", compress_rates=rates), load_tiny(tmp_path)
    tokens = prompts({"a": 70, "b": 11, "c": 33})
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    draw = Draw(3)
    paged = PagedModel(ours, page_size=8)
    got = in_steps(paged, tokens, lambda _: draw.integer(1, 9))
    assert_logits(got, wanted, "cut at random")


@pytest.mark.parametrize("chunk", [300, 131, 37])
def test_f10_groups_of_128_give_transformers_logits(chunk: int, tmp_path: Path) -> None:
    """F10: with the groups and the window of the published models, and their pages."""
    changes: dict[str, Any] = {
        "compress_rates": PUBLISHED, "sliding_window": 128, "max_position_embeddings": 512,
    }  # fmt: skip
    theirs, ours = save_tiny(tmp_path, "deepseek-v4", **changes), load_tiny(tmp_path)
    tokens = prompts({"a": 300, "b": 140})
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    got = in_steps(PagedModel(ours, page_size=128, num_pages=8), tokens, lambda _: chunk)
    assert_logits(got, wanted, f"chunks of {chunk}")


def test_f10_references_give_the_same_logits(tmp_path: Path) -> None:
    """F10: one token at a time and in chunks."""
    theirs = save_tiny(tmp_path, "deepseek-v4")
    ours = load_tiny(tmp_path, kernels=reference_kernels())
    tokens = prompts({"a": 23, "b": 7})
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    got = in_steps(PagedModel(ours), tokens, lambda name: 5 if name == "a" else 1)
    assert_logits(got, wanted, "references")


def test_f10_the_index_leaves_entries_out(tmp_path: Path) -> None:
    """F10: so that the tests above would notice an index that chooses all."""
    theirs = save_tiny(tmp_path, "deepseek-v4")
    [tokens] = prompts({"a": 41}).values()
    chosen = expected(theirs, tokens)
    theirs = save_tiny(tmp_path / "all", "deepseek-v4", index_topk=1000)
    differs = (chosen - expected(theirs, tokens)).abs().amax(dim=1) > 1e-3
    assert not differs[:10].any(), "five entries of two tokens are all"
    assert differs[20:].float().mean() > 0.5


def test_f10_checkpoints_under_published_names_are_read(tmp_path: Path) -> None:
    """F10: without the prefix that transformers adds, and with layers that draft."""
    theirs = save_tiny(tmp_path, "deepseek-v4")
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): one for name, one in load_file(file).items()}
    tensors["embed.weight"] = tensors.pop("embed_tokens.weight")
    for part in ("fn", "base", "scale"):
        tensors[f"hc_head_{part}"] = tensors.pop(f"hc_head.hc_{part}")
    tensors["mtp.0.norm.weight"] = torch.ones(48)
    save_file(tensors, file)
    [tokens] = prompts({"a": 21}).values()
    got = PagedModel(load_tiny(tmp_path)).step({"a": tokens})
    assert_logits(got, {"a": expected(theirs, tokens)}, "published names")


def test_f10_pages_must_hold_whole_groups() -> None:
    """F10: refused with both numbers before anything is computed."""
    layers = tiny_spec("deepseek-v4", compress_rates=PUBLISHED).layers
    check_page_size(layers, 256)
    with pytest.raises(ConfigError, match=r"--block-size is 16.*groups of 128.*multiple of 128"):
        check_page_size(layers, 16)


def test_f10_what_is_not_served_is_refused_by_name() -> None:
    """F10: other limits, scorings and pages in FP8."""
    with pytest.raises(ModelError, match=r"swiglu_limit is 7.0"):
        tiny_spec("deepseek-v4", swiglu_limit=7.0)
    with pytest.raises(ModelError, match=r"scoring_func is 'softmax'"):
        tiny_spec("deepseek-v4", scoring_func="softmax")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype is fp8"):
        with_pages_in(tiny_spec("deepseek-v4"), "fp8")
