"""Qwen3, dense: Llama whose queries and keys are normalised per head before rotation."""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
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
