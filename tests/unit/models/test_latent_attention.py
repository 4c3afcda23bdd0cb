"""Latent attention: pieces of prompts, what is expanded and what is absorbed, and what it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from manyroots.errors import AdapterError, ModelError
from manyroots.kernels.latent import step as latent_step
from manyroots.layers.latent_attention import LatentAttention
from manyroots.layers.linear import Linear
from manyroots.layers.memories import Latent
from manyroots.layers.spec import LatentSpec
from manyroots.models.decoder import Decoder
from manyroots.models.families import with_pages_in
from tests.gpu.models import make_model
from tests.unit.models.paged import PagedModel
from tests.unit.models.peft_models import make_pair
from tests.unit.models.test_logits_parity import assert_logits, expected, in_steps, prompts
from tests.unit.models.test_peft_parity import prompt, run
from tests.unit.models.tiny import load_tiny, save_tiny, tiny_spec

EVERY = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def spy(model: Decoder) -> tuple[list[int], Any]:
    """How many rows each product with `kv_b_proj` has from now on, and what stops listening."""
    seen: list[int] = []
    own = {
        mixer.kv_b
        for layer in model.layers
        for mixer in layer.mixers
        if isinstance(mixer, LatentAttention)
    }
    product = Linear.of

    def noted(self: Linear, x: Any, lora: Any) -> Any:
        if self in own:
            seen.append(len(x))
        return product(self, x, lora)

    return seen, mock.patch.object(Linear, "of", noted)


@pytest.mark.parametrize("most", [1, 5, 16])
@pytest.mark.parametrize("kind", ["deepseek-v2-lite", "deepseek-v3"])
def test_f07_prompts_in_pieces_give_transformers_logits(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F07: however few keys are expanded at once, and whichever prompts share a piece."""
    monkeypatch.setattr(latent_step, "MAX_KEYS", most)
    monkeypatch.setattr(LatentSpec, "prefers_latents", lambda *_: False)
    theirs, ours = save_tiny(tmp_path, kind), load_tiny(tmp_path)
    wanted = {name: expected(theirs, tokens) for name, tokens in prompts().items()}
    seen, listening = spy(ours)
    with listening:
        assert_logits(PagedModel(ours).step(prompts()), wanted, "at once")
        got = in_steps(PagedModel(ours), prompts(), lambda _: 9)
        assert_logits(got, wanted, "in chunks")
    assert max(seen) == most, "no more keys at once"


@pytest.mark.parametrize("prefers", [False, True])
def test_f08_adapters_in_pieces_and_absorbed_give_pefts_logits(
    prefers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F07, F08: keys of earlier chunks have their request's adapter of `kv_b_proj`, in pieces that
    several requests share; and so have queries that attend to latents."""
    monkeypatch.setattr(latent_step, "MAX_KEYS", 7)
    monkeypatch.setattr(LatentSpec, "prefers_latents", lambda *_: prefers)
    adapters = {
        "all": {"r": 4, "lora_alpha": 16, "target_modules": EVERY},
        "kv_b": {"r": 9, "lora_alpha": 9, "target_modules": ["kv_b_proj"]},
        "queries": {"r": 3, "lora_alpha": 9, "target_modules": ["q_a_proj"]},
    }
    pair = make_pair(tmp_path, "deepseek-v3", adapters)
    requests: dict[str, tuple[str | None, list[int]]] = {"base": (None, prompt(50, 29))}
    for index, name in enumerate(adapters):
        requests[name] = (name, prompt(index, 13 + 8 * index))
    for chunk in (None, 1, 6):
        run(pair, requests, chunk)


def test_f07_decode_expands_no_key_and_long_prompts_do(tmp_path: Path) -> None:
    """F07: nothing is multiplied with `kv_b_proj` but queries and what they attended to, until
    queries are many; then each key is expanded once a step."""
    save_tiny(tmp_path, "deepseek-v2-lite")
    ours = load_tiny(tmp_path)
    paged = PagedModel(ours)
    seen, listening = spy(ours)
    paged.step({"a": prompt(0, 30), "b": prompt(1, 20)})
    with listening:
        paged.step({"a": [4], "b": [5]})
        paged.step({"a": [4, 5, 6], "b": [5]})
        assert seen == []
        paged.step({"a": prompt(2, 40), "b": [6]})
    assert seen == [74] * ours.spec.num_layers


def public_spec() -> LatentSpec:
    """DeepSeek's sizes."""
    return LatentSpec(
        num_heads=128, nope=128, value_dim=128, memory=Latent(512, 64), q_rank=1536, rope=0,
        is_interleaved=True, scale=1.0, bias=False, norm_eps=1e-6,
    )  # fmt: skip


def test_f07_what_is_cheaper_is_counted_by_queries() -> None:
    """F07: with DeepSeek's sizes about 170 queries of a long context pay for expanding it, and
    fewer of a prompt that begins."""
    spec, context = public_spec(), 100_000

    def prefers(queries: int, keys: int) -> bool:
        return spec.prefers_latents(queries, keys, queries * keys)

    assert prefers(1, context)
    assert prefers(160, context)
    assert not prefers(180, context)
    assert not prefers(2048, 2048)


def test_f07_a_token_takes_a_latent_and_a_rotated_part() -> None:
    """F07: 1,152 bytes a layer with DeepSeek's sizes in bfloat16, whatever the number of heads; in
    FP8 576 and a row's scales, 16 bytes."""
    memory = public_spec().memory
    assert memory.unit_bytes(1, 1, torch.bfloat16) == 1152
    assert memory.unit_bytes(16, 61, torch.bfloat16) == 16 * 61 * 1152
    assert memory.in_dtype("float8_e4m3fn").unit_bytes(1, 1, torch.bfloat16) == 592


def in_fp8_pages(ours: Decoder) -> Decoder:
    """The same weights, with latents kept in FP8."""
    spec = with_pages_in(ours.spec, "fp8")
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"))
    filled = ours.weights()
    for name, fill in model.weights().items():
        fill.place.copy_(filled[name].place)
    model.pack_weights()
    return model


@pytest.mark.parametrize("kind", ["deepseek-v2-lite", "minicpm3"])
def test_f07_latents_in_fp8_stay_near(kind: str, tmp_path: Path) -> None:
    """F07: kept in FP8 with a scale for either part, latents move logits by a tenth of their spread
    at most; and by the same in chunks, since every query reads what was kept."""
    theirs = save_tiny(tmp_path, kind)
    ours = load_tiny(tmp_path)
    model = in_fp8_pages(ours)
    tokens = prompts()
    whole = PagedModel(model).step(tokens)
    for name, ids in tokens.items():
        wanted = expected(theirs, ids)
        spread = wanted.std()
        off = (whole[name] - wanted).square().mean().sqrt()
        assert 1e-4 * spread < off < 0.1 * spread, (off, spread)
    for chunk in (1, 9):
        got = in_steps(PagedModel(model), tokens, lambda _, size=chunk: size)
        assert_logits(got, whole, f"chunks of {chunk}")


def test_q01_products_in_fp8_blocks_are_absorbed_as_they_are_expanded(tmp_path: Path) -> None:
    """Q01, F07: with blocks of 128 x 128, as DeepSeek publishes them, latents and expanded keys are
    multiplied with the same numbers of `kv_b_proj`."""
    make_model(tmp_path, "deepseek-v3-fp8-block", is_decisive=True)
    model = load_tiny(tmp_path / "base")
    tokens = {name: ids[:40] for name, ids in prompts().items()}
    found = []
    for prefers in (False, True):
        with mock.patch.object(LatentSpec, "prefers_latents", lambda *_, is_so=prefers: is_so):
            found.append(PagedModel(model).step(tokens))
    assert_logits(found[1], found[0], "absorbed")
    make_model(tmp_path / "whole", "deepseek-v3", is_decisive=True)
    whole = PagedModel(load_tiny(tmp_path / "whole" / "base")).step(tokens)
    for name, logits in whole.items():
        off = (found[0][name] - logits).square().mean().sqrt()
        assert 1e-4 * logits.std() < off < 0.2 * logits.std()


def test_f01_layers_that_predict_ahead_are_left_out_by_name(tmp_path: Path) -> None:
    """F01: checkpoints of V3, V3.2, GLM Flash and GLM-5 have them after the last layer."""
    for kind in ("deepseek-v3", "deepseek-v32", "glm4-moe-lite", "glm-moe-dsa"):
        folder = tmp_path / kind
        theirs = save_tiny(folder, kind)
        tensors = load_file(folder / "model.safetensors")
        count = theirs.config.num_hidden_layers
        ahead = {
            name.replace(".layers.2.", f".layers.{count}."): tensor.clone()
            for name, tensor in tensors.items()
            if ".layers.2." in name
        }
        ahead[f"model.layers.{count}.eh_proj.weight"] = torch.zeros(48, 96)
        ahead[f"model.layers.{count}.shared_head.head.weight"] = torch.zeros(97, 48)
        save_file({**tensors, **ahead}, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
        wanted = {name: expected(theirs, tokens) for name, tokens in prompts().items()}
        assert_logits(PagedModel(load_tiny(folder)).step(prompts()), wanted, kind)


def test_f08_an_activated_adapter_of_kv_b_is_refused_by_name(tmp_path: Path) -> None:
    """F08, N22: it would change keys of tokens before its invocation."""
    options = {"r": 2, "alora_invocation_tokens": [7, 8], "target_modules": ["kv_b_proj"]}
    with pytest.raises(AdapterError, match=r"alora_invocation_tokens.*kv_b_proj.*without"):
        make_pair(tmp_path, "deepseek-v3", {"activated": options})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"n_group": 5}, "12 experts in 5 groups"),
        ({"n_group": 12, "topk_group": 2}, "a token chooses 2, and 3 experts"),
        ({"topk_group": 5}, "topk_group 5"),
    ],
)
def test_f01_sizes_that_do_not_go_together_are_refused(changes: dict[str, Any], says: str) -> None:
    """F01."""
    with pytest.raises(ModelError, match=says):
        tiny_spec("deepseek-v3", **changes)
