"""Qwen3-Next: three layers of gated delta nets to one of gated attention, all with experts.

Attention has a gate for each head in its query product and rotates a quarter of each head. All
norms except the delta net's own have weights that are stored minus one. There is a shared expert
with its own gate.
"""

from __future__ import annotations

from typing import Any

from manyroots.errors import ModelError
from manyroots.layers.spec import (
    BlockSpec,
    DeltaSpec,
    DenseSpec,
    LayerSpec,
    MixerSpec,
    SharedSpec,
)
from manyroots.models.architecture import (
    COMMON,
    LINEAR,
    Architecture,
    ConfigType,
    Values,
    fill_types,
)
from manyroots.models.fields import MAX_SIDE, whole
from manyroots.models.qwen3_moe import experts, sparse_layers
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.prediction import PredictionNames
from manyroots.models.windows import FULL


def describe(reader: ConfigReader) -> ModelSpec:
    """Qwen3-Next-80B-A3B and similar models."""
    text = reader.text
    block = shared_experts(reader, renormalises=text.norm_topk_prob)
    sparse = sparse_layers(text)
    blocks: list[BlockSpec] = [
        block if index in sparse else reader.dense(bias=False)
        for index in range(text.num_hidden_layers)
    ]
    return hybrid(reader, blocks, is_fused=True)


def hybrid(reader: ConfigReader, blocks: list[BlockSpec], *, is_fused: bool) -> ModelSpec:
    """Delta nets and gated attention by `layer_types`, with these feed-forward blocks."""
    text = reader.text
    bias = text.attention_bias
    mixers: dict[str, MixerSpec] = {
        LINEAR: delta_net(text, is_fused=is_fused),
        FULL: reader.attention(
            qkv_bias=bias, o_bias=bias, qk_norm=True, window=None, has_gate=True
        ),
    }
    kinds = reader.layer_types(mixers)
    layers = [
        LayerSpec(mixers=(mixers[kind],), feed_forward=block)
        for kind, block in zip(kinds, blocks, strict=True)
    ]
    return reader.model(layers, ropes=[reader.rope(is_partial=True)], norm_offset=1.0)


def delta_net(text: Any, *, is_fused: bool) -> DeltaSpec:
    """The config's delta nets."""
    heads, key_heads = text.linear_num_value_heads, text.linear_num_key_heads
    if heads % key_heads:
        raise ModelError(
            f"the model's linear_num_value_heads is {heads} and its linear_num_key_heads "
            f"{key_heads}; the first must be a multiple of the second. Check its config.json."
        )
    if text.hidden_act != "silu":
        raise ModelError(
            f"the model's hidden_act is {text.hidden_act!r}; delta nets have 'silu'. Check its "
            "config.json."
        )
    return DeltaSpec(
        key_heads=key_heads,
        num_heads=heads,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        width=text.linear_conv_kernel_dim,
        is_fused=is_fused,
    )


def shared_experts(reader: ConfigReader, *, renormalises: bool) -> SharedSpec:
    """Experts, and the shared one that every token goes through."""
    return SharedSpec(
        experts=experts(reader, renormalises=renormalises),
        shared=DenseSpec(
            intermediate_size=reader.text.shared_expert_intermediate_size,
            activation=reader.activation(),
            bias=False,
            name="mlp.shared_expert",
        ),
        gate="mlp.shared_expert_gate",
    )


def finish(values: Values) -> None:
    """Shared by Qwen3-Next and Qwen3.5."""
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = values["mlp_only_layers"] or []
    period = values.get("full_attention_interval", 4)
    fill_types(values, lambda layer: LINEAR if (layer + 1) % period else FULL)


DEFAULTS: Values = COMMON | {
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
}
ARCHITECTURES = {
    "Qwen3NextForCausalLM": Architecture(
        {
            "qwen3_next": ConfigType(
                DEFAULTS
                | {
                    "vocab_size": 151936,
                    "hidden_size": 2048,
                    "intermediate_size": 5632,
                    "num_hidden_layers": 48,
                    "num_key_value_heads": 2,
                    "decoder_sparse_step": 1,
                    "moe_intermediate_size": 512,
                    "shared_expert_intermediate_size": 512,
                    "num_experts_per_tok": 10,
                    "num_experts": 512,
                    "norm_topk_prob": True,
                    "mlp_only_layers": None,
                },
                finish,
                partial=0.25,
            )
        },
        describe,
        prediction=PredictionNames.MTP,
        fields={
            "linear_conv_kernel_dim": whole(2, 64),
            "linear_key_head_dim": whole(1, MAX_SIDE),
            "linear_value_head_dim": whole(1, MAX_SIDE),
            "linear_num_key_heads": whole(1, MAX_SIDE),
            "linear_num_value_heads": whole(1, MAX_SIDE),
            "shared_expert_intermediate_size": whole(1, MAX_SIDE),
        },
    ),
}
