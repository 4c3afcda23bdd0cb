"""Granite 3, dense: Llama with factors from the config.

Embeddings, scores, layer outputs and logits have one factor each, as in Granite 4.
"""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import (
    Architecture,
    ConfigType,
    GgufForm,
    Values,
    fill_kv_heads,
)
from manyroots.models.llama import DEFAULTS, unpaired
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.gguf_file import GGUFFile


def describe(reader: ConfigReader) -> ModelSpec:
    """Granite 3.0 to 3.3 from 2B to 8B."""
    text = reader.text
    bias = text.attention_bias
    layer = LayerSpec(
        mixers=(
            reader.attention(
                qkv_bias=bias, o_bias=bias, qk_norm=False, window=None,
                scale=text.attention_multiplier,
            ),
        ),
        feed_forward=reader.dense(bias=text.mlp_bias),
        factor=text.residual_multiplier,
    )  # fmt: skip
    return reader.model(
        [layer] * text.num_hidden_layers,
        embedding_scale=text.embedding_multiplier,
        logits_factor=1.0 / text.logits_scaling,
    )


def _of_gguf(file: GGUFFile, values: Values) -> Values:
    return {
        "embedding_multiplier": file.number("granite.embedding_scale"),
        "attention_multiplier": file.number("granite.attention.scale"),
        "residual_multiplier": file.number("granite.residual_scale"),
        "logits_scaling": file.number("granite.logit_scale"),
    }


ARCHITECTURES = {
    "GraniteForCausalLM": Architecture(
        {
            "granite": ConfigType(
                DEFAULTS
                | {
                    "mlp_bias": False,
                    "embedding_multiplier": 1.0,
                    "logits_scaling": 1.0,
                    "residual_multiplier": 1.0,
                    "attention_multiplier": 1.0,
                },
                fill_kv_heads,
            )
        },
        describe,
        gguf=GgufForm(
            "granite",
            "granite",
            _of_gguf,
            restore=unpaired,
            reads=("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
        ),
    ),
}
