"""Mistral: Llama without any biases, and in its first versions with a sliding window."""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import of_every_layer, of_typed_layers


def describe(reader: ConfigReader) -> ModelSpec:
    """Mistral 7B and its kin."""
    # What transformers' AutoConfig makes of a Mistral whose config types its layers.
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
