"""What a config means, in plain numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeForCausalLM

from manyroots.errors import ModelError
from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.moe_pairs.routing import Scoring
from manyroots.layers.rotary import rope_frequencies
from manyroots.layers.spec import ExpertsSpec
from manyroots.models.load import describe
from manyroots.models.registry import architecture_of, known_architecture
from manyroots.models.spec import ModelSpec
from tests.unit.models.tiny import LLAMA3, tiny_config, tiny_source, tiny_spec


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.memory.window for layer in spec.layers]


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
    assert tiny_spec("qwen3", head_dim=16).layers[0].memory.head_dim == 16
    assert tiny_spec("qwen2").layers[0].memory.head_dim == 8


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


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_rotary_scaling_that_depends_on_length_is_refused_by_name(kind: str) -> None:
    config = tiny_config()
    config.rope_parameters = {**LLAMA3, "rope_type": kind}
    with pytest.raises(ModelError, match=rf"'{kind}'.*default, linear, llama3, yarn"):
        rope_frequencies(config, 8)


def test_partial_rotation_is_refused() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(ModelError, match=r"part \(0\.5\)"):
        tiny_spec(rope_parameters=parameters)


def test_a_quantized_checkpoint_is_refused_by_method() -> None:
    with pytest.raises(ModelError, match=r"'awq'.*GGUF"):
        tiny_spec(quantization_config={"quant_method": "awq"})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError, match="6 attention heads and 4 key-value heads"):
        tiny_spec(num_key_value_heads=4)


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
