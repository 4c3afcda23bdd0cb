"""Qwen3 mixture of experts: Qwen3 whose feed-forward blocks are experts behind a router.

Layers that the config excepts, by name (`mlp_only_layers`) or by rhythm (`decoder_sparse_step`),
have the dense block of Qwen3.
"""

from __future__ import annotations

from typing import Any

from manyroots.errors import ModelError
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.spec import ExpertsSpec, LayerSpec
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import of_every_layer


def describe(reader: ConfigReader) -> ModelSpec:
    """Qwen3-30B-A3B, Qwen3-235B-A22B and their kin."""
    text = reader.text
    bias, sparse = text.attention_bias, sparse_layers(text)
    block = experts(reader, renormalises=text.norm_topk_prob) if sparse else None
    layers = []
    for index, window in enumerate(of_every_layer(text)):
        mixer = reader.attention(qkv_bias=bias, o_bias=bias, qk_norm=True, window=window)
        feed_forward = reader.dense(bias=False) if block is None or index not in sparse else block
        layers.append(LayerSpec(mixers=(mixer,), feed_forward=feed_forward))
    return reader.model(layers)


def experts(reader: ConfigReader, *, renormalises: bool) -> ExpertsSpec:
    """What a config says of its experts. `renormalises`: whether the chosen ones' weights add up
    to one."""
    config = reader.text
    chosen, count = config.num_experts_per_tok, config.num_experts
    if not 1 <= chosen <= count:
        raise ModelError(
            f"the model has {count} experts and num_experts_per_tok {chosen}; the second must be "
            f"between 1 and {count}. Check its config.json."
        )
    return ExpertsSpec(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=config.moe_intermediate_size,
        activation=reader.activation(),
        scoring=Scoring.SOFTMAX_RENORMALISED if renormalises else Scoring.SOFTMAX,
    )


def sparse_layers(config: Any) -> frozenset[int]:
    """The layers that have experts: every `decoder_sparse_step`th, less those named dense."""
    step = config.decoder_sparse_step
    if step < 1:
        raise ModelError(
            f"the model's decoder_sparse_step is {step}; it must be at least 1. Check its "
            "config.json."
        )
    if not config.num_experts:
        return frozenset()
    every = range(step - 1, config.num_hidden_layers, step)
    return frozenset(every) - frozenset(config.mlp_only_layers or ())
