"""Qwen3, dense: Llama whose queries and keys are normalised per head before rotation."""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import KV_HEADS, Architecture, ConfigType, GgufForm
from manyroots.models.qwen2 import DEFAULTS, finish
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import of_typed_layers


def describe(reader: ConfigReader) -> ModelSpec:
    """Dense; perhaps with windows in the upper layers."""
    bias = reader.text.attention_bias
    return reader.model(
        [
            LayerSpec(
                mixers=(reader.attention(qkv_bias=bias, o_bias=bias, qk_norm=True, window=window),),
                feed_forward=reader.dense(bias=False),
            )
            for window in of_typed_layers(reader.text)
        ]
    )


ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(
        {
            "qwen3": ConfigType(
                DEFAULTS | {"head_dim": 128, "attention_bias": False}, finish, may_be_null=KV_HEADS
            )
        },
        describe,
        gguf=GgufForm("qwen3", "qwen3"),
    ),
}
