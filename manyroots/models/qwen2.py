"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and nowhere else."""

from __future__ import annotations

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
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import FULL, SLIDING, of_typed_layers


def describe(reader: ConfigReader) -> ModelSpec:
    """Dense; perhaps with windows in the upper layers."""
    return reader.model(
        [
            LayerSpec(
                mixers=(
                    reader.attention(qkv_bias=True, o_bias=False, qk_norm=False, window=window),
                ),
                feed_forward=reader.dense(bias=False),
            )
            for window in of_typed_layers(reader.text)
        ]
    )


def drop_unused_window(values: Values) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None


def finish(values: Values) -> None:
    """Shared by Qwen2 and Qwen3."""
    drop_unused_window(values)
    fill_kv_heads(values)
    window, first = values["sliding_window"], values["max_window_layers"]
    fill_types(values, lambda layer: SLIDING if window is not None and layer >= first else FULL)


DEFAULTS: Values = COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture(
        {"qwen2": ConfigType(DEFAULTS, finish, may_be_null=KV_HEADS)},
        describe,
        fields={"max_window_layers": ("a whole number", lambda value: type(value) is int)},
        gguf=GgufForm("qwen2", "qwen2"),
    ),
}
