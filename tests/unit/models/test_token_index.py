"""An index of tokens (DeepSeek V3.2, GLM-5): what is chosen, what it takes, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyroots.bench.model_configs import write_config
from manyroots.config import engine_settings
from manyroots.errors import ModelError
from manyroots.kernels.choice import reference_kernels
from manyroots.layers.memories import Latent
from manyroots.models.decoder import Decoder
from manyroots.models.families import families
from manyroots.models.load import describe
from manyroots.models.source import resolve_source
from tests.helpers.seeded import Draw
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_latent_attention import in_fp8_pages
from tests.unit.models.test_logits_parity import assert_logits, expected, in_steps, prompts
from tests.unit.models.tiny import load_tiny, save_tiny, tiny_spec

KINDS = ("deepseek-v32", "glm-moe-dsa")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_chosen", [1, 9, 30])
def test_f10_prompts_cut_at_random_give_transformers_logits(
    kind: str, num_chosen: int, tmp_path: Path
) -> None:
    """F10: chunks of all lengths and decodes share steps, and some sequences are shorter than what
    a query may choose."""
    theirs, ours = save_tiny(tmp_path, kind, index_topk=num_chosen), load_tiny(tmp_path)
    tokens = prompts({"a": 70, "b": 11, "c": 33})
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    draw = Draw(num_chosen)
    got = in_steps(PagedModel(ours, page_size=8), tokens, lambda _: draw.integer(1, 9))
    assert_logits(got, wanted, "cut at random")


@pytest.mark.parametrize("kind", KINDS)
def test_f10_references_give_the_same_logits(kind: str, tmp_path: Path) -> None:
    """F10: one token at a time and in chunks."""
    theirs = save_tiny(tmp_path, kind)
    ours = load_tiny(tmp_path, kernels=reference_kernels())
    tokens = prompts({"a": 23, "b": 7})
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    got = in_steps(PagedModel(ours), tokens, lambda name: 5 if name == "a" else 1)
    assert_logits(got, wanted, "references")


@pytest.mark.parametrize("kind", KINDS)
def test_f10_the_index_leaves_tokens_out(kind: str, tmp_path: Path) -> None:
    """F10: so that the tests above would notice an index that chooses all."""
    theirs = save_tiny(tmp_path, kind)
    [tokens] = prompts({"a": 41}).values()
    chosen = expected(theirs, tokens)
    whole = save_tiny(tmp_path / "all", kind, index_topk=1000)
    differs = (chosen - expected(whole, tokens)).abs().amax(dim=1) > 1e-3
    assert not differs[:6].any(), "six tokens are all"
    assert differs[10:].float().mean() > 0.5


def test_f10_a_shared_index_is_that_of_the_layer_before() -> None:
    """F10: layers without an index keep no keys of one, in a family of their own; the published
    ways to say which layers have one are read."""
    spec = tiny_spec("glm-moe-dsa")
    own, shared = families(spec.layers)
    assert (own.layers, shared.layers) == ((0, 2), (1, 3))
    assert (own.memory, shared.memory) == (
        Latent(20, 6, index=14, num_chosen=6), Latent(20, 6, num_chosen=6),
    )  # fmt: skip
    ways: list[dict[str, Any]] = [
        {"index_topk_pattern": "FSSF"},
        {"index_topk_pattern": ["full", "shared", "shared", "full"]},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    ]
    for way in ways:
        spec = tiny_spec("glm-moe-dsa", indexer_types=None, **way)
        assert [family.layers for family in families(spec.layers)] == [(0, 3), (1, 2)], way
    [every] = families(tiny_spec("glm-moe-dsa", indexer_types=None).layers)
    assert every.layers == (0, 1, 2, 3)


def test_f10_a_token_takes_a_latent_a_rotated_part_and_a_key_of_the_index() -> None:
    """F10: 1,408 bytes a layer with DeepSeek's sizes in bfloat16; in FP8 the latents shrink and the
    keys do not. A query reads all keys and the latents that it chose."""
    memory = Latent(512, 64, index=128, num_chosen=2048)
    assert memory.unit_bytes(16, 61, torch.bfloat16) == 16 * 61 * 1408
    assert memory.in_dtype("float8_e4m3fn").unit_bytes(1, 1, torch.bfloat16) == 592 + 256
    numbers = memory.units_read(100_000) * (512 + 64 + 128)
    assert numbers == pytest.approx(100_000 * 128 + 2048 * 576)


def test_f10_latents_in_fp8_are_chosen_by_keys_in_the_models_dtype(tmp_path: Path) -> None:
    """F10: logits stay as near as those of this model without an index do (0.13 of their spread),
    and chunks choose the same, since every query reads what was kept."""
    theirs = save_tiny(tmp_path, "deepseek-v32", index_topk=30)
    model = in_fp8_pages(load_tiny(tmp_path))
    [tokens] = prompts({"a": 41}).values()
    whole = PagedModel(model).step({"a": tokens})
    wanted = expected(theirs, tokens)
    off = (whole["a"] - wanted).square().mean().sqrt()
    assert 1e-4 * wanted.std() < off < 0.2 * wanted.std(), (off, wanted.std())
    assert_logits(in_steps(PagedModel(model), {"a": tokens}, lambda _: 9), whole, "chunks")


@pytest.mark.parametrize(
    ("name", "billions"), [("deepseek-v3.2-6-layers", 38.2), ("glm-5-6-layers", 32.7)]
)
def test_f10_published_configs_are_described_at_full_width(
    name: str, billions: float, tmp_path: Path
) -> None:
    """F10: every weight of the first layers has its place, on a device without memory."""
    folder = write_config(name, tmp_path)
    settings = engine_settings({"model": str(folder), "load_format": "dummy"})
    spec = describe(resolve_source(settings.model))
    decoder = Decoder(spec, dtype=torch.bfloat16, device=torch.device("meta"))
    places = {name: fill.place for name, fill in decoder.weights().items()}
    assert sum(place.numel() for place in places.values()) / 1e9 == pytest.approx(billions, abs=0.1)
    heads = spec.layers[5].mixers[0].index.num_heads  # type: ignore[union-attr]
    index = "model.layers.5.self_attn.indexer"
    assert places[f"{index}.weights_proj.weight"].shape == (heads, spec.hidden_size)
    assert places[f"{index}.wk.weight"].shape == (128, spec.hidden_size)
    assert places[f"{index}.k_norm.bias"].shape == (128,)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("deepseek-v32", {"index_head_dim": 4}, r"index_head_dim is 4.*qk_rope_head_dim"),
        ("glm-moe-dsa", {"indexer_types": ["shared"] * 4}, r"begin with 'shared'.*must be 'full'"),
        ("glm-moe-dsa", {"indexer_types": ["full"] * 3}, r"4 layers.*3 entries"),
        ("glm-moe-dsa", {"indexer_types": ["full", "half"] * 2}, r"full, half.*'full' or 'shared'"),
    ],
)
def test_f10_what_contradicts_itself_is_refused_by_name(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    """F10: before anything is allocated."""
    with pytest.raises(ModelError, match=message):
        tiny_spec(kind, **changes)


def test_f10_glm_5_next_is_refused_by_name(tmp_path: Path) -> None:
    """F01, F10: its index is of pooled tokens and its other layers are delta attention with a
    bound, which this version does not compute."""
    config = {
        "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next",
        "text_config": {"model_type": "glm5_next_text", "num_hidden_layers": 4},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = engine_settings({"model": str(tmp_path), "load_format": "dummy"})
    with pytest.raises(ModelError, match=r"Glm5NextForConditionalGeneration.*GlmMoeDsaForCausalLM"):
        describe(resolve_source(settings.model))
