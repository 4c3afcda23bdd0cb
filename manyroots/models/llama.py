"""Llama 2 and 3, SmolLM2, and all that calls itself so: the plain decoder."""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
from manyroots.models.spec import ConfigReader, ModelSpec


def describe(reader: ConfigReader) -> ModelSpec:
    """All layers alike."""
    text = reader.text
    bias = text.attention_bias
    layer = LayerSpec(
        mixers=(reader.attention(qkv_bias=bias, o_bias=bias, qk_norm=False, window=None),),
        feed_forward=reader.dense(bias=text.mlp_bias),
    )
    return reader.model([layer] * text.num_hidden_layers)
