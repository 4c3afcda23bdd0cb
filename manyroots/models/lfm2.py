"""LFM2: short gated convolutions, and attention in every few layers."""

from __future__ import annotations

from manyroots.kernels.activation.kinds import Activation
from manyroots.layers.spec import DenseSpec, LayerSpec, MixerSpec, ShortConvSpec
from manyroots.models.architecture import Architecture, ConfigType, Values, fill_types, renamed
from manyroots.models.fields import FLAG, MAX_SIDE, number, whole
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import FULL

_NORMS = {
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".embedding_norm.": ".norm.",
}
"""The checkpoint's names of norms, and the decoder's."""


def describe(reader: ConfigReader) -> ModelSpec:
    """The dense models."""
    text, block = reader.text, dense(reader)
    convolution = ShortConvSpec(
        channels=text.hidden_size, width=text.conv_L_cache, bias=text.conv_bias
    )
    attention = reader.attention(
        qkv_bias=False, o_bias=False, qk_norm=True, window=None, o_name="out_proj"
    )
    mixers: dict[str, MixerSpec] = {"conv": convolution, FULL: attention}
    kinds = reader.layer_types(mixers)
    return reader.model(
        [LayerSpec(mixers=(mixers[kind],), feed_forward=block) for kind in kinds],
        eps=text.norm_eps,
    )


def dense(reader: ConfigReader) -> DenseSpec:
    """The feed-forward block; some configs give its width before adjustment."""
    text = reader.text
    inner = text.intermediate_size
    if text.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if text.block_ffn_dim_multiplier is not None:
            multiple = text.block_multiple_of
            inner = -(-int(text.block_ffn_dim_multiplier * inner) // multiple) * multiple
    return DenseSpec(
        intermediate_size=inner,
        activation=Activation.SILU,
        bias=False,
        name="feed_forward",
        parts=("w1", "w3", "w2"),
    )


def _finish(values: Values) -> None:
    full = values["full_attn_idxs"]
    fill_types(values, lambda layer: FULL if full is None or layer in full else "conv")
    values["tie_word_embeddings"] = values.get("tie_embedding", values["tie_word_embeddings"])
    values["intermediate_size"] = values.get("block_ff_dim", values["intermediate_size"])


ARCHITECTURES = {
    "Lfm2ForCausalLM": Architecture(
        {
            "lfm2": ConfigType(
                {
                    "vocab_size": 65536,
                    "hidden_size": 2560,
                    "intermediate_size": 12288,
                    "num_hidden_layers": 32,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 8,
                    "max_position_embeddings": 128000,
                    "norm_eps": 1e-5,
                    "eos_token_id": 2,
                    "tie_word_embeddings": True,
                    "rope_parameters": None,
                    "conv_bias": False,
                    "conv_L_cache": 3,
                    "block_multiple_of": 256,
                    "block_ffn_dim_multiplier": 1.0,
                    "block_auto_adjust_ff_dim": True,
                    "full_attn_idxs": None,
                    "layer_types": None,
                },
                _finish,
                theta=1_000_000.0,
            )
        },
        describe,
        renamed(_NORMS),
        fields={
            "norm_eps": number("a number between 0 and 1", lambda value: 0 <= value <= 1),
            "conv_L_cache": whole(2, 64),
            "conv_bias": FLAG,
            "block_auto_adjust_ff_dim": FLAG,
            "block_multiple_of": whole(1, MAX_SIDE),
            "block_ffn_dim_multiplier": number(
                "a number above 0, or null", lambda value: value > 0, or_none=True
            ),
        },
    ),
}
