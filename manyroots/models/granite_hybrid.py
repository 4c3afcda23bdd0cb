"""Granite 4 hybrids: many layers of Mamba-2 to one of attention, with experts or without.

Attention has no rotation in most of them. Embeddings, scores, layer outputs and logits have factors
from the config. There is a shared block beside the experts; dense models have only that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.rotary import RopeSpec
from manyroots.layers.spec import (
    BlockSpec,
    DenseSpec,
    GatedNormKind,
    LayerSpec,
    MambaSpec,
    MixerSpec,
    SharedSpec,
)
from manyroots.models.architecture import (
    LINEAR,
    Architecture,
    ConfigType,
    Values,
    fill_kv_heads,
    fill_types,
    renamed,
)
from manyroots.models.fields import FLAG, MAX_SIDE, POSITIVE, whole
from manyroots.models.llama import DEFAULTS
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert
from manyroots.models.windows import FULL

_STACKED = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.router.weight",
}
"""The names in published checkpoints, and newer names."""


def describe(reader: ConfigReader) -> ModelSpec:
    """Granite 4.0 H from 350M to Small, and those of the same architecture without Mamba."""
    text, block = reader.text, feed_forward(reader)
    bias = text.attention_bias
    attention = reader.attention(
        qkv_bias=bias, o_bias=bias, qk_norm=False, window=None, scale=text.attention_multiplier
    )
    mixers: dict[str, MixerSpec] = {FULL: attention}
    if LINEAR in text.layer_types:
        mixers[LINEAR] = mamba(text)
    layers = [
        LayerSpec(mixers=(mixers[kind],), feed_forward=block, factor=text.residual_multiplier)
        for kind in reader.layer_types(mixers)
    ]
    turns = text.position_embedding_type == "rope"
    return reader.model(
        layers,
        ropes=[reader.rope() if turns else RopeSpec((), 1.0)],
        embedding_scale=text.embedding_multiplier,
        logits_factor=1.0 / text.logits_scaling,
    )


def mamba(text: Any) -> MambaSpec:
    """The config's Mamba-2 layers."""
    _check_mamba(text)
    return MambaSpec(
        num_heads=text.mamba_n_heads,
        head_dim=text.mamba_d_head,
        groups=text.mamba_n_groups,
        shares_group=text.mamba_n_groups == 1,
        state_dim=text.mamba_d_state,
        width=text.mamba_d_conv,
        conv_bias=text.mamba_conv_bias,
        in_bias=text.mamba_proj_bias,
        out_bias=text.mamba_proj_bias,
        norm=GatedNormKind.GATE_FIRST,
        norm_groups=text.mamba_n_groups,
    )


def _check_mamba(text: Any) -> None:
    """Refuse what the kernels do not support."""
    heads, groups = text.mamba_n_heads, text.mamba_n_groups
    if heads % groups:
        raise ModelError(
            f"the model's mamba_n_heads is {heads} and its mamba_n_groups {groups}; the first must "
            "be a multiple of the second. Check its config.json."
        )
    if text.hidden_act != "silu":
        raise ModelError(
            f"the model's hidden_act is {text.hidden_act!r}; Mamba-2 has 'silu'. Check its "
            "config.json."
        )
    limits = text.time_step_limit
    if limits is not None and tuple(limits) != (0.0, float("inf")):
        raise ModelError(
            f"the model's time_step_limit is {limits}; this version serves models without one "
            "([0.0, Infinity]). Choose another checkpoint."
        )


def feed_forward(reader: ConfigReader) -> BlockSpec:
    """The shared block, with experts if there are any."""
    text = reader.text
    shared = DenseSpec(
        intermediate_size=text.shared_intermediate_size,
        activation=reader.activation(),
        bias=False,
        name="shared_mlp",
        parts=("input_linear", "", "output_linear"),
        is_fused=True,
    )
    if not text.num_local_experts:
        return shared
    experts = reader.experts(
        text.num_local_experts,
        intermediate_size=text.intermediate_size,
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        router="router",
        name="block_sparse_moe",
    )
    return SharedSpec(experts=experts, shared=shared, gate=None)


def translate(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Experts one by one, for either name of their stacks."""
    return per_expert(renamed(_STACKED)(weights))


def check_mamba_heads(values: Values, inner: int) -> None:
    heads = values["mamba_n_heads"]
    if values["mamba_d_head"] == "auto":
        values["mamba_d_head"] = inner // heads
    if inner % heads or values["mamba_d_head"] * heads != inner:
        raise ValueError(
            f"its Mamba layers are {inner} wide, which is not mamba_n_heads ({heads}) times "
            f"mamba_d_head ({values['mamba_d_head']})."
        )
    if values["time_step_limit"] is not None:
        values["time_step_limit"] = tuple(values["time_step_limit"])


def _finish(values: Values) -> None:
    fill_kv_heads(values)
    check_mamba_heads(values, values["mamba_expand"] * values["hidden_size"])
    fill_types(values, lambda layer: LINEAR)


MAMBA_DEFAULTS: Values = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, math.inf),
}
ARCHITECTURES = {
    "GraniteMoeHybridForCausalLM": Architecture(
        {
            "granitemoehybrid": ConfigType(
                DEFAULTS
                | MAMBA_DEFAULTS
                | {
                    "embedding_multiplier": 1.0,
                    "logits_scaling": 1.0,
                    "residual_multiplier": 1.0,
                    "attention_multiplier": 1.0,
                    "num_local_experts": 8,
                    "num_experts_per_tok": 2,
                    "shared_intermediate_size": 1024,
                    "position_embedding_type": None,
                    "layer_types": None,
                },
                _finish,
                other_names={"layer_types": "layers_block_type"},
            )
        },
        describe,
        translate,
        fields={
            "shared_intermediate_size": whole(1, MAX_SIDE),
            "mamba_n_heads": whole(1, MAX_SIDE),
            "mamba_d_head": (
                f"a whole number between 1 and {MAX_SIDE}, or 'auto'",
                lambda value: value == "auto" or (type(value) is int and 1 <= value <= MAX_SIDE),
            ),
            "mamba_n_groups": whole(1, MAX_SIDE),
            "mamba_d_state": whole(1, MAX_SIDE),
            "mamba_d_conv": whole(2, 64),
            "mamba_expand": POSITIVE,
            "mamba_conv_bias": FLAG,
            "mamba_proj_bias": FLAG,
            "position_embedding_type": (
                "'rope', 'nope' or null",
                lambda value: value in ("rope", "nope", None),
            ),
            "attention_multiplier": POSITIVE,
            "residual_multiplier": POSITIVE,
            "logits_scaling": POSITIVE,
        },
    ),
}
