"""Falcon-H1: every layer has attention and Mamba-2 side by side, on one input.

Nearly everything has a factor from the config: embeddings, logits, both mixers' inputs and outputs,
keys, the parts of Mamba's first product, the feed-forward block's gate and output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manyroots.layers.spec import GatedNormKind, LayerSpec, MambaSpec
from manyroots.models.architecture import (
    KV_HEADS,
    Architecture,
    ConfigType,
    Values,
    fill_kv_heads,
    renamed,
)
from manyroots.models.fields import FLAG, MAX_SIDE, POSITIVE, numbers, whole
from manyroots.models.granite_hybrid import MAMBA_DEFAULTS, check_mamba_heads, mamba
from manyroots.models.llama import DEFAULTS
from manyroots.models.spec import ConfigReader, ModelSpec

_NORMS = {
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
}
"""The checkpoint's names of norms, and the decoder's."""


def describe(reader: ConfigReader) -> ModelSpec:
    """Falcon-H1 from 0.5B to 34B."""
    text = reader.text
    bias = text.attention_bias
    attention = replace(
        # Keys are scaled like scores: the product of a query and a key has both factors.
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
    layer = LayerSpec(mixers=(attention, _mamba(text)), feed_forward=block)
    return reader.model(
        [layer] * text.num_hidden_layers,
        embedding_scale=text.embedding_multiplier,
        logits_factor=text.lm_head_multiplier,
    )


def _mamba(text: Any) -> MambaSpec:
    norm = GatedNormKind.GATE_ONLY
    if text.mamba_rms_norm:
        before = text.mamba_norm_before_gate
        norm = GatedNormKind.NORM_FIRST if before else GatedNormKind.GATE_FIRST
    return replace(
        mamba(text),
        out_bias=text.projectors_bias,
        norm=norm,
        in_factor=text.ssm_in_multiplier,
        out_factor=text.ssm_out_multiplier,
        part_factors=tuple(text.ssm_multipliers),
    )


def _finish(values: Values) -> None:
    fill_kv_heads(values)
    own = values["mamba_d_ssm"]
    inner = values["mamba_expand"] * values["hidden_size"] if own is None else own
    check_mamba_heads(values, inner)
    values["mlp_multipliers"] = values["mlp_multipliers"] or [1.0] * 2
    values["ssm_multipliers"] = values["ssm_multipliers"] or [1.0] * 5


ARCHITECTURES = {
    "FalconH1ForCausalLM": Architecture(
        {
            "falcon_h1": ConfigType(
                DEFAULTS
                | MAMBA_DEFAULTS
                | {
                    "vocab_size": 128000,
                    "intermediate_size": 14336,
                    "num_key_value_heads": 8,
                    "rms_norm_eps": 1e-5,
                    "max_position_embeddings": 8192,
                    "mlp_bias": False,
                    "mamba_d_ssm": 1024,
                    "mamba_norm_before_gate": True,
                    "mamba_rms_norm": False,
                    "projectors_bias": False,
                    "lm_head_multiplier": 1.0,
                    "embedding_multiplier": 1.0,
                    "mlp_multipliers": None,
                    "key_multiplier": 1.0,
                    "attention_out_multiplier": 1.0,
                    "attention_in_multiplier": 1.0,
                    "ssm_multipliers": None,
                    "ssm_in_multiplier": 1.0,
                    "ssm_out_multiplier": 1.0,
                },
                _finish,
                may_be_null=KV_HEADS,
            )
        },
        describe,
        renamed(_NORMS),
        fields={
            "mamba_d_ssm": whole(1, MAX_SIDE, or_none=True),
            "mamba_rms_norm": FLAG,
            "mamba_norm_before_gate": FLAG,
            "projectors_bias": FLAG,
            "lm_head_multiplier": POSITIVE,
            "key_multiplier": POSITIVE,
            "attention_in_multiplier": POSITIVE,
            "attention_out_multiplier": POSITIVE,
            "ssm_in_multiplier": POSITIVE,
            "ssm_out_multiplier": POSITIVE,
            "mlp_multipliers": numbers(2),
            "ssm_multipliers": numbers(5),
        },
    ),
}
