"""Hybrids: what of a checkpoint is read, what is refused, and how long a prompt takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5VisionConfig,
)

from manyroots.errors import ModelError
from manyroots.models.families import families
from manyroots.models.kernel_set import why_not_triton
from manyroots.models.load import describe
from manyroots.models.source import ModelSource, SourceKind
from manyroots.models.weight_bytes import num_weights
from tests.unit.kernels.recurrent_cases import CountedOps
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_logits_parity import assert_logits, expected, prompts
from tests.unit.models.tiny import load_tiny, save_tiny, tiny_config, tiny_spec

RECURRENT = ["qwen3-next", "qwen3.5", "qwen3.5-moe", "granite-h", "falcon-h1"]


def rewritten(folder: Path, rename: dict[str, str], more: dict[str, Tensor] | None = None) -> None:
    """The checkpoint in `folder` with other names, and with more tensors."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        for old, new in rename.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file({**tensors, **(more or {})}, file)


@pytest.mark.parametrize("kind", ["qwen3-next", "qwen3.5"])
def test_weights_that_draft_are_left_out(kind: str, tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path, kind)
    more = {"mtp.layers.0.mlp.gate.weight": torch.ones(3, 3), "mtp.fc.weight": torch.ones(2, 2)}
    rewritten(tmp_path, {}, more)
    tokens = prompts({"a": 9})
    got = PagedModel(load_tiny(tmp_path)).step(tokens)
    assert_logits(got, {"a": expected(theirs, tokens["a"])}, "with weights that draft")


WITH_IMAGES: dict[str, tuple[Any, Any]] = {
    "qwen3.5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3.5-moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe"])
def test_a_checkpoint_with_images_gives_the_logits_of_its_text_model(
    kind: str, is_tied: bool, tmp_path: Path
) -> None:
    """F01: Qwen3.5 as it is published: `text_config`, `model.language_model`, `model.visual`. The
    outer config says whether the head is the embedding, whatever the text's says."""
    text = tiny_config(kind, tie_word_embeddings=False)
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [1, 1, 0]}
    vision = Qwen3_5VisionConfig(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48
    )
    config_class, model_class = WITH_IMAGES[kind]
    config = config_class(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        architectures=[model_class.__name__],
        dtype="float32",
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    theirs = model_class(config).eval()
    theirs.save_pretrained(tmp_path)
    assert any("visual" in name for name in load_file(tmp_path / "model.safetensors"))
    tokens = prompts({"a": 23})
    got = PagedModel(load_tiny(tmp_path)).step(tokens)
    assert_logits(got, {"a": expected(theirs, tokens["a"])}, "with images")


def test_granites_published_names_of_experts_are_read(tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path, "granite-h")
    published = {
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    }
    names = " ".join(load_file(tmp_path / "model.safetensors"))
    newer = {new: old for old, new in published.items()}
    for rename in (published, newer):
        rewritten(tmp_path, rename)
        renamed = " ".join(load_file(tmp_path / "model.safetensors"))
        assert all(new in renamed for new in rename.values()), names
        tokens = prompts({"a": 9})
        got = PagedModel(load_tiny(tmp_path)).step(tokens)
        assert_logits(got, {"a": expected(theirs, tokens["a"])}, "by other names")


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        ("qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads is 3"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3.5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim of tiny is 1"),
        ("qwen3.5", {"layer_types": ["conv"] * 3}, "with conv"),
        ("granite-h", {"mamba_n_groups": 4}, "mamba_n_groups 4"),
        ("granite-h", {"time_step_limit": (0.1, 2.0)}, "time_step_limit is"),
        ("granite-h", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("granite-h", {"position_embedding_type": "alibi"}, "position_embedding_type of tiny"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers of tiny"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                       "partial_rotary_factor": 0.5}}, "only a part"),
    ],
)  # fmt: skip
def test_configs_that_fit_no_such_model_are_refused_by_the_field(
    kind: str, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(ModelError, match=what):
        tiny_spec(kind, **changes)


@pytest.mark.parametrize("kind", RECURRENT)
def test_the_weights_that_are_counted_are_those_that_are_made(kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, kind)
    model = load_tiny(tmp_path)
    made = sum(fill.place.numel() for fill in model.weights().values())
    assert num_weights(model.spec, model.spec.vocab_size) == made


PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    # Billions of weights, and MiB of one state in bfloat16.
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, 79.7, 73.7
    ),
    "Qwen3.5-27B": (
        {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
         "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
         "num_attention_heads": 24, "linear_num_value_heads": 48}, 26.9, 146.8
    ),
    "Granite-4.0-H-Small": (
        {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
         "hidden_size": 4096, "intermediate_size": 768, "shared_intermediate_size": 1536,
         "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128,
         "mamba_d_head": 64, "mamba_d_state": 128, "vocab_size": 100352,
         "tie_word_embeddings": True,
         "layer_types": ["full_attention" if i in (5, 15, 25, 35) else "linear_attention"
                         for i in range(40)]}, 32.2, 145.8
    ),
    "Falcon-H1-7B": (
        {"model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"],
         "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 44,
         "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
         "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_n_groups": 1,
         "mamba_d_state": 256, "vocab_size": 130048}, 7.6, 132.9
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_described_f02(name: str, tmp_path: Path) -> None:
    """F02: what weights and a state take follows from the description, and the GPU's kernels
    compute each of them."""
    fields, billions, state_mib = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    spec = describe(ModelSource(SourceKind.FOLDER, tmp_path, config, name, (2,), None))
    assert num_weights(spec, spec.vocab_size) / 1e9 == pytest.approx(billions, abs=0.1)
    [state] = [family for family in families(spec.layers) if family.is_state]
    assert state.unit_bytes(16, torch.bfloat16) / 2**20 == pytest.approx(state_mib, abs=0.1)
    assert why_not_triton(spec) is None


@pytest.mark.parametrize("kind", ["qwen3.5", "granite-h-dense"])
def test_long_prompts_of_hybrids_are_computed_in_chunks_f06(kind: str, tmp_path: Path) -> None:
    """F06: 2,000 tokens take a small part of the operators that as many steps of one do."""
    save_tiny(tmp_path, kind, max_position_embeddings=4096)
    [tokens] = prompts({"a": 2000}).values()
    paged = PagedModel(load_tiny(tmp_path), num_pages=600, page_size=16)
    with CountedOps() as whole:
        paged.step({"a": tokens})
    with CountedOps() as single:
        paged.step({"b": tokens[:1]})
    assert len(tokens) * single.count >= 50 * whole.count
