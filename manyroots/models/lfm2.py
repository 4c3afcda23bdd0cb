"""LFM2: short gated convolutions, and attention in every few layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from manyroots.kernels.activation.kinds import Activation
from manyroots.layers.spec import DenseSpec, LayerSpec, MixerSpec, ShortConvSpec
from manyroots.models.spec import ConfigReader, ModelSpec

_NORMS = {
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".embedding_norm.": ".norm.",
}
"""What the checkpoint calls norms, and what the decoder does."""


def describe(reader: ConfigReader) -> ModelSpec:
    """The dense ones."""
    text, block = reader.text, dense(reader)
    convolution = ShortConvSpec(
        channels=text.hidden_size, width=text.conv_L_cache, bias=text.conv_bias
    )
    attention = reader.attention(
        qkv_bias=False, o_bias=False, qk_norm=True, window=None, o_name="out_proj"
    )
    mixers: dict[str, MixerSpec] = {"conv": convolution, "full_attention": attention}
    kinds = reader.layer_types(mixers)
    return reader.model(
        [LayerSpec(mixers=(mixers[kind],), feed_forward=block) for kind in kinds],
        eps=text.norm_eps,
    )


def dense(reader: ConfigReader) -> DenseSpec:
    """The feed-forward block, whose width some configs give before it is adjusted."""
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


def translate(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Norms by the names that all models have here."""
    for name, tensor in weights:
        for theirs, ours in _NORMS.items():
            name = name.replace(theirs, ours)
        yield name, tensor
