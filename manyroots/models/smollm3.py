"""SmolLM3: Llama in which every fourth layer has no rotation (NoPE)."""

from __future__ import annotations

from manyroots.errors import ModelError
from manyroots.layers.rotary import RopeSpec
from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import (
    COMMON,
    KV_HEADS,
    Architecture,
    ConfigType,
    GgufForm,
    Values,
    fill_kv_heads,
    fill_types,
)
from manyroots.models.fields import MAX_LAYERS, list_of, whole
from manyroots.models.llama import unpaired
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import FULL, SLIDING, of_typed_layers

_ROTATED, _PLAIN = 0, 1
"""Indexes of the model's rotations."""


def describe(reader: ConfigReader) -> ModelSpec:
    """SmolLM3-3B and similar models."""
    text = reader.text
    bias, rotated = text.attention_bias, text.no_rope_layers
    if len(rotated) < text.num_hidden_layers:
        raise ModelError(
            f"the model has {text.num_hidden_layers} layers, and no_rope_layers {len(rotated)} "
            "entries; there must be one for each. Check its config.json."
        )
    windows: list[int | None] = [None] * text.num_hidden_layers
    if text.use_sliding_window:
        windows = of_typed_layers(text)
    layers = [
        LayerSpec(
            mixers=(
                reader.attention(
                    qkv_bias=bias, o_bias=bias, qk_norm=False, window=window,
                    rope=_ROTATED if is_rotated else _PLAIN,
                ),
            ),
            feed_forward=reader.dense(bias=text.mlp_bias),
        )
        for window, is_rotated in zip(windows, rotated, strict=False)
    ]  # fmt: skip
    return reader.model(layers, ropes=[reader.rope(), RopeSpec((), 1.0)])


def _finish(values: Values) -> None:
    fill_kv_heads(values)
    if values["no_rope_layers"] is None:
        interval = values["no_rope_layer_interval"]
        count = values["num_hidden_layers"]
        values["no_rope_layers"] = [int((i + 1) % interval != 0) for i in range(count)]
    rotated = values["no_rope_layers"]
    has_window = values["use_sliding_window"] and values["sliding_window"] is not None
    fill_types(values, lambda layer: SLIDING if has_window and not rotated[layer] else FULL)


ARCHITECTURES = {
    "SmolLM3ForCausalLM": Architecture(
        {
            "smollm3": ConfigType(
                COMMON
                | {
                    "vocab_size": 128256,
                    "hidden_size": 2048,
                    "intermediate_size": 11008,
                    "num_hidden_layers": 36,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 32768,
                    "eos_token_id": 128001,
                    "tie_word_embeddings": True,
                    "use_sliding_window": False,
                    "sliding_window": None,
                    "no_rope_layers": None,
                    "no_rope_layer_interval": 4,
                    "layer_types": None,
                    "attention_bias": False,
                    "mlp_bias": False,
                },
                _finish,
                may_be_null=KV_HEADS,
                theta=2_000_000.0,
            )
        },
        describe,
        fields={
            "no_rope_layers": (
                "a list of 0 and 1, or null",
                lambda value: value is None or list_of(lambda one: one in (0, 1))(value),
            ),
            "no_rope_layer_interval": whole(1, MAX_LAYERS),
        },
        # Files do not state that every fourth layer has no rotation; llama.cpp fills in the same.
        gguf=GgufForm("smollm3", "smollm3", restore=unpaired),
    ),
}
