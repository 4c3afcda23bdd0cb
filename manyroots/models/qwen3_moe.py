"""Qwen3 mixture of experts: Qwen3 whose feed-forward blocks are experts behind a router.

Layers that the config excepts, by name (`mlp_only_layers`) or by rhythm (`decoder_sparse_step`),
have the dense block of Qwen3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from manyroots.errors import ModelError
from manyroots.layers.moe import ExpertsSpec, SparseMLP
from manyroots.models.llama import FeedForward
from manyroots.models.qwen3 import Qwen3
from manyroots.models.spec import Traits
from manyroots.models.windows import of_every_layer


class Qwen3Moe(Qwen3):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and their kin."""

    @staticmethod
    def traits(config: Any) -> Traits:
        dense = Traits(
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            mlp_bias=False,
            qk_norm=True,
            sliding_window=of_every_layer(config),
        )
        layers = sparse_layers(config)
        return replace(dense, experts=experts(config), sparse_layers=layers) if layers else dense

    def make_mlp(
        self, layer_index: int, *, dtype: torch.dtype, device: torch.device
    ) -> FeedForward:
        spec, traits = self.spec, self.spec.traits
        if traits.experts is None or layer_index not in traits.sparse_layers:
            return super().make_mlp(layer_index, dtype=dtype, device=device)
        return SparseMLP(
            spec.hidden_size,
            traits.experts,
            activation=spec.hidden_act,
            dtype=dtype,
            device=device,
        )


def experts(config: Any) -> ExpertsSpec:
    """What a config says of its experts."""
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
        norm_topk_prob=config.norm_topk_prob,
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
