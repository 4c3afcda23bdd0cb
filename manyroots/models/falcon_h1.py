"""Falcon-H1: every layer has attention and Mamba-2 side by side, on one input.

Nearly everything has a factor from the config: embeddings, logits, both mixers' inputs and outputs,
keys, the parts of Mamba's first product, the feed-forward block's gate and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from manyroots.layers.spec import GatedNormKind, LayerSpec, MambaSpec
from manyroots.models.granite_hybrid import check_mamba
from manyroots.models.spec import ConfigReader, ModelSpec

_NORMS = {
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
}
"""What the checkpoint calls norms, and what the decoder does."""


def describe(reader: ConfigReader) -> ModelSpec:
    """Falcon-H1 from 0.5B to 34B."""
    text = reader.text
    bias = text.attention_bias
    attention = replace(
        # Keys are scaled as scores are: the product of a query and a key has both factors.
        reader.attention(
            qkv_bias=bias, o_bias=bias, qk_norm=False, window=None,
            scale=reader.head_dim**-0.5 * text.key_multiplier,
        ),
        in_factor=text.attention_in_multiplier,
        out_factor=text.attention_out_multiplier,
    )  # fmt: skip
    gate, down = text.mlp_multipliers
    block = replace(
        reader.dense(bias=text.mlp_bias), name="feed_forward", gate_factor=gate, down_factor=down
    )
    layer = LayerSpec(mixers=(attention, mamba(text)), feed_forward=block)
    return reader.model(
        [layer] * text.num_hidden_layers,
        embedding_scale=text.embedding_multiplier,
        logits_factor=text.lm_head_multiplier,
    )


def mamba(text: Any) -> MambaSpec:
    """What a config says of Mamba-2."""
    check_mamba(text)
    norm = GatedNormKind.GATE_ONLY
    if text.mamba_rms_norm:
        before = text.mamba_norm_before_gate
        norm = GatedNormKind.NORM_FIRST if before else GatedNormKind.GATE_FIRST
    return MambaSpec(
        num_heads=text.mamba_n_heads,
        head_dim=text.mamba_d_head,
        groups=text.mamba_n_groups,
        shares_group=text.mamba_n_groups == 1,
        state_dim=text.mamba_d_state,
        width=text.mamba_d_conv,
        conv_bias=text.mamba_conv_bias,
        in_bias=text.mamba_proj_bias,
        out_bias=text.projectors_bias,
        norm=norm,
        norm_groups=text.mamba_n_groups,
        in_factor=text.ssm_in_multiplier,
        out_factor=text.ssm_out_multiplier,
        part_factors=tuple(text.ssm_multipliers),
    )


def translate(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Norms by the names that all models have here."""
    for name, tensor in weights:
        for theirs, ours in _NORMS.items():
            name = name.replace(theirs, ours)
        yield name, tensor
