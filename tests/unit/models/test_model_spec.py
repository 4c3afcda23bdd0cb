"""What a config means, in plain numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from transformers.activations import ACT2FN

from manyroots.config import ModelSettings
from manyroots.errors import ModelError
from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.rotary import rope_frequencies
from manyroots.layers.spec import DenseSpec, ExpertsSpec
from manyroots.models.families import families
from manyroots.models.load import describe
from manyroots.models.registry import ARCHITECTURES, architecture_of, known_architecture
from manyroots.models.source import resolve_source
from manyroots.models.spec import ACTIVATIONS, ModelSpec
from tests.unit.models.tiny import LLAMA3, WINDOW, tiny_config, tiny_source, tiny_spec


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.memory.window for layer in spec.layers]


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, [None] * 3),
        ("mistral", {"sliding_window": None}, [None] * 3),
        ("mistral", {"sliding_window": 64}, [64] * 3),
        ("qwen2", {"sliding_window": 64}, [None] * 3),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
            [None] * 3,
        ),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            [None, 64, 64],
        ),
        (
            "qwen3",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
            [64] * 3,
        ),
        ("qwen3", {"sliding_window": 64}, [None] * 3),
        ("qwen3-moe", {"sliding_window": 64}, [None] * 3),
        ("qwen3-moe", {"sliding_window": 64, "use_sliding_window": True}, [64] * 3),
    ],
)
def test_p09_a_window_counts_only_where_a_layer_uses_it(
    kind: str, changes: dict[str, Any], expected: list[int | None]
) -> None:
    """P09: windows are found and converted once at load, a case per model family."""
    spec = tiny_spec(kind, **changes)
    assert windows(spec) == expected
    assert spec.max_len == 256


def test_p09_a_window_in_a_nested_text_config_is_found() -> None:
    """P09: nested configs."""
    text = tiny_config("mistral", sliding_window=32)
    outer = SimpleNamespace(
        get_text_config=lambda: text, architectures=text.architectures, model_type="mistral"
    )
    source = replace(tiny_source("mistral"), config=outer)  # type: ignore[arg-type]
    assert windows(describe(source)) == [32] * 3


def test_heads_of_their_own_size_are_read() -> None:
    assert tiny_spec("qwen3", head_dim=16).layers[0].attention.memory.head_dim == 16
    assert tiny_spec("qwen2").layers[0].attention.memory.head_dim == 8


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"mlp_only_layers": [0, 3]}, {1, 2, 4}),
        ({"decoder_sparse_step": 2}, {1, 3}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {3}),
        ({"num_experts": 0}, set()),
    ],
)
def test_layers_with_experts_are_those_transformers_gives_them(
    changes: dict[str, Any], sparse: set[int]
) -> None:
    changes = {"num_hidden_layers": 5, **changes}
    layers = tiny_spec("qwen3-moe", **changes).layers
    theirs = Qwen3MoeForCausalLM(tiny_config("qwen3-moe", **changes)).model.layers
    assert {i for i, layer in enumerate(theirs) if hasattr(layer.mlp, "experts")} == sparse
    ours = {i for i, layer in enumerate(layers) if isinstance(layer.feed_forward, ExpertsSpec)}
    assert ours == sparse


def test_experts_are_read_from_the_config() -> None:
    assert tiny_spec("qwen3-moe").layers[0].feed_forward == ExpertsSpec(
        num_experts=8,
        experts_per_token=3,
        intermediate_size=24,
        activation=Activation.SILU,
        scoring=Scoring.SOFTMAX_RENORMALISED,
    )


@pytest.mark.parametrize("chosen", [0, 9])
def test_more_experts_per_token_than_there_are_is_refused(chosen: int) -> None:
    with pytest.raises(ModelError, match=f"8 experts and num_experts_per_tok {chosen}.*1 and 8"):
        tiny_spec("qwen3-moe", num_experts_per_tok=chosen)


def test_a_rhythm_of_no_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="decoder_sparse_step is 0"):
        tiny_spec("qwen3-moe", decoder_sparse_step=0)


@pytest.mark.parametrize("kind", ["dynamic", "proportional"])
def test_rotary_scaling_that_depends_on_length_is_refused_by_name(kind: str) -> None:
    config = tiny_config()
    config.rope_parameters = {**LLAMA3, "rope_type": kind}
    with pytest.raises(ModelError, match=rf"'{kind}'.*default, linear, llama3, yarn"):
        rope_frequencies(config, 8)


def test_partial_rotation_is_refused() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(ModelError, match=r"part \(0\.5\)"):
        tiny_spec(rope_parameters=parameters)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3", {"hidden_activation": "swish7"}, "swish7"),
        ("gpt-oss", {"swiglu_limit": 5.0}, r"swiglu_limit is 5\.0"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, r"swiglu_alpha 1\.0"),
        ("gpt-oss", {"num_experts_per_tok": 9}, "between 1 and 8"),
        ("gemma3", {"quantization_config": {"quant_method": "mxfp4"}}, r"'mxfp4'.*unquantized"),
    ],
)
def test_what_gemma_and_gpt_oss_could_have_and_is_not_served_is_refused_by_name(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        tiny_spec(kind, **changes)


def test_gemma_has_two_rotations_and_two_families_of_layers() -> None:
    spec = tiny_spec("gemma3")
    assert [layer.attention.rope for layer in spec.layers] == [1, 1, 0, 1]
    assert [len(family.layers) for family in families(spec.layers)] == [1, 3]
    assert spec.ropes[0].frequencies[0] == 1 / 8, "the far-sighted layers' is scaled"
    assert spec.ropes[1].frequencies[0] == 1.0
    assert {layer.attention.scale for layer in spec.layers} == {24**-0.5}
    assert all(layer.has_post_norms for layer in spec.layers)
    assert spec.embedding_scale == 48**0.5


def test_gpt_oss_has_windows_in_every_other_layer_by_default() -> None:
    spec = tiny_spec("gpt-oss")
    assert windows(spec) == [WINDOW, None, WINDOW]
    assert windows(tiny_spec("gpt-oss", layer_types=["full_attention"] * 3)) == [None] * 3
    assert all(layer.attention.has_sinks for layer in spec.layers)


def test_a_quantized_checkpoint_is_refused_by_method() -> None:
    with pytest.raises(ModelError, match=r"'awq'.*GGUF"):
        tiny_spec(quantization_config={"quant_method": "awq"})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError, match="6 attention heads and 4 key-value heads"):
        tiny_spec(num_key_value_heads=4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_with_nothing_but_its_type_is_described(name: str, tmp_path: Path) -> None:
    """So that no field is read which an architecture's own config does not have."""
    for model_type in ARCHITECTURES[name].configs:
        fields: dict[str, Any] = {"model_type": model_type, "architectures": [name]}
        if model_type == "glm4_moe":
            fields["head_dim"] = 128  # transformers' defaults turn 21 dimensions of each head
        if model_type == "nemotron_h":
            fields["layers_block_type"] = ["linear_attention", "mlp"]  # by default, experts, too
        if model_type == "deepseek_v2":
            fields["num_experts_per_tok"] = 6  # none by default, which no model can have
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert describe(resolve_source(ModelSettings(model=str(tmp_path)))).num_layers > 0


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {"hidden_activation": "relu"}), ("gemma3", {"hidden_act": "relu"})],
)
def test_a_field_that_other_architectures_have_counts_for_nothing(
    kind: str, changes: dict[str, Any]
) -> None:
    assert tiny_spec(kind, **changes) == tiny_spec(kind)


def test_an_unknown_activation_is_refused_when_the_model_is_described() -> None:
    with pytest.raises(ModelError, match="'mish'"):
        tiny_spec(hidden_act="mish")


def test_an_unknown_architecture_lists_those_that_are_served() -> None:
    with pytest.raises(ModelError, match=r"'MambaForCausalLM'.*LlamaForCausalLM.*Qwen3"):
        known_architecture("MambaForCausalLM")


def test_a_config_without_architectures_goes_by_its_model_type() -> None:
    config = tiny_config("qwen2")
    config.architectures = None
    assert architecture_of(config) == "Qwen2ForCausalLM"
    config = tiny_config("qwen3-moe")
    config.architectures = None
    assert architecture_of(config) == "Qwen3MoeForCausalLM"


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_activations_go_by_all_their_names(name: str) -> None:
    """Those that transformers computes alike are one here; the others are refused by name."""
    x = torch.linspace(-15, 15, 97)
    alike = [
        known
        for known in ACTIVATIONS
        if torch.allclose(compute(known, x), compute(name, x), atol=1e-5)
    ]
    if not alike:
        with pytest.raises(ModelError, match=f"hidden_act is '{name}'"):
            tiny_spec(hidden_act=name)
        return
    block = tiny_spec(hidden_act=name).layers[0].feed_forward
    assert isinstance(block, DenseSpec)
    assert block.activation is ACTIVATIONS[alike[0]]


def compute(name: str, x: Tensor) -> Tensor:
    values: Tensor = ACT2FN[name](x)
    return values.detach()
