"""Mistral: Llama without any biases, and in its first versions with a sliding window. Ministral:
windows by the type of each layer."""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import (
    COMMON,
    Architecture,
    ConfigType,
    GgufForm,
    Values,
    fill_head_dim,
    fill_kv_heads,
    fill_types,
)
from manyroots.models.llama import unpaired
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import FULL, SLIDING, gguf_window, of_every_layer, of_typed_layers


def describe(reader: ConfigReader) -> ModelSpec:
    """Mistral 7B, Ministral 8B and similar models."""
    # Transformers' AutoConfig does the same for a Mistral whose config types its layers.
    rule = of_typed_layers if reader.text.model_type == "ministral" else of_every_layer
    return reader.model(
        [
            LayerSpec(
                mixers=(
                    reader.attention(qkv_bias=False, o_bias=False, qk_norm=False, window=window),
                ),
                feed_forward=reader.dense(bias=False),
            )
            for window in rule(reader.text)
        ]
    )


def _finish(values: Values) -> None:
    fill_head_dim(values)
    fill_kv_heads(values)


def _typed(values: Values) -> None:
    fill_kv_heads(values)
    kind = FULL if values["sliding_window"] is None else SLIDING
    fill_types(values, lambda layer: kind)


DEFAULTS: Values = COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
_MINISTRAL = ConfigType(DEFAULTS | {"layer_types": None}, _typed)
ARCHITECTURES = {
    "MistralForCausalLM": Architecture(
        {
            "mistral": ConfigType(DEFAULTS, _finish),
            # Transformers does the same for a Mistral whose config types its layers.
            "ministral": _MINISTRAL,
        },
        describe,
        # Files of Mistral have the architecture llama; the window distinguishes them.
        gguf=GgufForm(
            "llama", "mistral", is_meant=lambda file: bool(gguf_window(file)), restore=unpaired
        ),
    ),
    # The name that transformers saves such a model under.
    "MinistralForCausalLM": Architecture({"ministral": _MINISTRAL}, describe),
}
