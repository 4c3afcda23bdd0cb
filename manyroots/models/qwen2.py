"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and nowhere else."""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import of_typed_layers


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
