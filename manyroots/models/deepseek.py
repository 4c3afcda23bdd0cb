"""DeepSeek-V2 and V3, R1 and Kimi K2: latent attention, and experts after a few dense layers.

V2 chooses experts by softmax. V3 chooses by sigmoids, with a number for each expert that affects
only the choice. Both may choose groups of experts first. V2-Lite has no latent for its queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.fused_moe.routing import ExpertGroups, Scoring
from manyroots.layers.memories import Latent
from manyroots.layers.spec import (
    BlockSpec,
    DenseSpec,
    LatentSpec,
    LayerSpec,
    MixerSpec,
    SharedSpec,
    TokenIndexSpec,
)
from manyroots.models.architecture import (
    COMMON,
    Architecture,
    ConfigType,
    Tensors,
    Values,
    check_whole_heads,
    fill_kv_heads,
    renamed,
)
from manyroots.models.fields import FLAG, MAX_SIDE, whole
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert
from manyroots.models.weights.prediction import PredictionNames

GREEDY, LIMITED = "greedy", "group_limited_greedy"
_OF_IMAGES = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
_TEXT_NAMES = {
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.model.": "model.",
}
NORM_EPS = 1e-6
"""Epsilon of the latents' norms; the config's applies only to the others."""


def describe_v2(reader: ConfigReader) -> ModelSpec:
    """DeepSeek-V2, V2-Lite and V2.5."""
    text = reader.text
    bias = text.mlp_bias
    is_limited = text.topk_method == LIMITED
    groups = expert_groups(text) if is_limited else None
    block = experts(reader, scoring=Scoring.SOFTMAX, groups=groups, bias=bias)
    dense = reader.dense(bias=bias)
    return latent_model(reader, blocks(text, dense, block), is_interleaved=True)


def describe_v3(reader: ConfigReader) -> ModelSpec:
    """DeepSeek-V3, R1 and Kimi K2."""
    text = reader.text
    block = sigmoid_experts(reader)
    is_interleaved = bool(text.rope_interleave)
    dense = reader.dense(bias=False)
    return latent_model(reader, blocks(text, dense, block), is_interleaved=is_interleaved)


def latent_model(
    reader: ConfigReader,
    feed_forward: Sequence[BlockSpec],
    *,
    is_interleaved: bool,
    indexes: Sequence[TokenIndexSpec | None] | None = None,
) -> ModelSpec:
    """Latent attention in every layer, with these feed-forward blocks, and with these indexes where
    queries choose tokens."""
    if indexes is None:
        indexes = [None] * len(feed_forward)
    layers = [
        LayerSpec(
            mixers=(latent_attention(reader.text, is_interleaved=is_interleaved, index=index),),
            feed_forward=block,
        )
        for block, index in zip(feed_forward, indexes, strict=True)
    ]
    return reader.model(layers, ropes=[reader.rope()])


def latent_attention(
    text: Any,
    *,
    is_interleaved: bool,
    is_rotated: bool = True,
    index: TokenIndexSpec | None = None,
) -> MixerSpec:
    """The config's latent attention. `is_rotated`: whether positions matter at all."""
    if text.num_key_value_heads != text.num_attention_heads:
        raise ModelError(
            f"the model's num_key_value_heads is {text.num_key_value_heads} and its "
            f"num_attention_heads {text.num_attention_heads}; latent attention has a key for each "
            "head. Check its config.json."
        )
    if is_rotated and text.head_dim != text.qk_rope_head_dim:
        raise ModelError(
            f"the model's head_dim is {text.head_dim} and its qk_rope_head_dim "
            f"{text.qk_rope_head_dim}; these are one number here. Remove head_dim "
            "from its config.json."
        )
    scale = (text.qk_nope_head_dim + text.qk_rope_head_dim) ** -0.5
    return LatentSpec(
        num_heads=text.num_attention_heads,
        nope=text.qk_nope_head_dim,
        value_dim=text.v_head_dim,
        memory=Latent(
            text.kv_lora_rank,
            text.qk_rope_head_dim,
            index=index.head_dim if index is not None and index.is_own else 0,
            num_chosen=None if index is None else index.num_chosen,
        ),
        q_rank=text.q_lora_rank,
        rope=0,
        is_interleaved=is_interleaved,
        scale=scale * (_yarn_scale(text.rope_parameters) if is_rotated else 1.0),
        bias=text.attention_bias,
        norm_eps=NORM_EPS,
        index=index,
    )


def _yarn_scale(rope: Values) -> float:
    """YaRN's factor of scores besides the rotation: the square of its scale for all dimensions."""
    by = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not by:
        return 1.0
    factor = rope.get("factor")
    if factor is None:
        raise ModelError(
            "the model's rope_parameters have mscale_all_dim but no factor; complete them in its "
            "config.json."
        )
    scale = 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0
    return float(scale * scale)


def blocks(text: Any, dense: DenseSpec, sparse: SharedSpec) -> list[BlockSpec]:
    """Dense blocks in the first layers."""
    count = text.num_hidden_layers
    num_dense = min(text.first_k_dense_replace, count)
    return [dense if index < num_dense else sparse for index in range(count)]


def sigmoid_experts(reader: ConfigReader, count: int | None = None) -> SharedSpec:
    """The experts of V3 and of later models. `count`: if the config has another name for it."""
    renormalises = reader.text.norm_topk_prob
    return experts(
        reader,
        scoring=Scoring.SIGMOID_RENORMALISED if renormalises else Scoring.SIGMOID,
        groups=expert_groups(reader.text),
        has_correction=True,
        count=count,
    )


def experts(
    reader: ConfigReader,
    *,
    scoring: Scoring,
    groups: ExpertGroups | None,
    bias: bool = False,
    has_correction: bool = False,
    count: int | None = None,
) -> SharedSpec:
    """Experts, and one block of the experts that every token goes through. `bias`: of that
    block."""
    text = reader.text
    count = text.n_routed_experts if count is None else count
    if groups is not None:
        size, rest = divmod(count, groups.count)
        if rest or size * groups.chosen < text.num_experts_per_tok:
            raise ModelError(
                f"the model has {count} experts in {groups.count} groups, of which a token chooses "
                f"{groups.chosen}, and {text.num_experts_per_tok} experts within them; groups must "
                "be equal, and those chosen have as many experts. Check its config.json."
            )
    return SharedSpec(
        experts=reader.experts(
            count,
            intermediate_size=text.moe_intermediate_size,
            scoring=scoring,
            has_correction=has_correction,
            factor=float(text.routed_scaling_factor),
            groups=groups,
        ),
        shared=DenseSpec(
            intermediate_size=text.moe_intermediate_size * text.n_shared_experts,
            activation=reader.activation(),
            bias=bias,
            name="mlp.shared_experts",
        ),
        gate=None,
    )


def expert_groups(text: Any) -> ExpertGroups | None:
    """None if all groups are chosen."""
    count, chosen = text.n_group, text.topk_group
    if count is None or chosen is None or chosen > count:
        raise ModelError(
            f"the model's n_group is {count} and its topk_group {chosen}; both must be numbers, "
            "the second at most the first. Check its config.json."
        )
    return None if count == chosen else ExpertGroups(count, chosen)


def of_text(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """The text model's tensors under its own names, from a model with vision."""
    own = ((name, tensor) for name, tensor in weights if not name.startswith(_OF_IMAGES))
    return per_expert(renamed(_TEXT_NAMES)(own))


def finish(values: Values) -> None:
    """For rotations, a head is only the rotated part, whatever the file states."""
    fill_kv_heads(values)
    values["head_dim"] = values["qk_rope_head_dim"]


def finish_v3(values: Values) -> None:
    """The same, but transformers takes a head's size from the file where it has one."""
    fill_kv_heads(values)
    values.setdefault("head_dim", values["qk_rope_head_dim"])


def _finish_v2(values: Values) -> None:
    check_whole_heads(values)
    finish(values)


LATENT_DEFAULTS: Values = COMMON | {
    "attention_bias": False,
    "num_key_value_heads": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3 = ConfigType(
    LATENT_DEFAULTS
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "eos_token_id": 1,
        "rope_interleave": True,
    },
    finish_v3,
    other_names={"n_routed_experts": "num_local_experts"},
    may_be_null=("num_key_value_heads",),
)
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Architecture(
        {
            "deepseek_v2": ConfigType(
                LATENT_DEFAULTS
                | {
                    "vocab_size": 102400,
                    "hidden_size": 4096,
                    "intermediate_size": 11008,
                    "num_hidden_layers": 32,
                    "num_attention_heads": 32,
                    "max_position_embeddings": 2048,
                    "mlp_bias": False,
                    "eos_token_id": 2,
                    "first_k_dense_replace": 0,
                    "n_group": None,
                    "topk_group": None,
                    "topk_method": GREEDY,
                    "n_routed_experts": 64,
                    "n_shared_experts": 2,
                    "routed_scaling_factor": 1.0,
                    "num_experts_per_tok": None,
                    "norm_topk_prob": False,
                    "moe_intermediate_size": 1407,
                },
                _finish_v2,
                other_names={"n_routed_experts": "num_experts"},
            )
        },
        describe_v2,
        fields={
            "kv_lora_rank": whole(1, MAX_SIDE),
            "q_lora_rank": whole(1, MAX_SIDE, or_none=True),
            "qk_nope_head_dim": whole(1, MAX_SIDE),
            "qk_rope_head_dim": whole(1, MAX_SIDE),
            "v_head_dim": whole(1, MAX_SIDE, or_none=True),
            "rope_interleave": FLAG,
            "topk_method": (
                f"{GREEDY!r} or {LIMITED!r}",
                lambda value: value in (GREEDY, LIMITED, "noaux_tc"),
            ),
        },
    ),
    "DeepseekV3ForCausalLM": Architecture(
        {"deepseek_v3": _V3, "kimi_k2": _V3},
        describe_v3,
        prediction=PredictionNames.NUMBERED,
    ),
    "KimiK25ForConditionalGeneration": Architecture(
        {"kimi_k25": ConfigType({"tie_word_embeddings": True}, text="deepseek_v3")},
        describe_v3,
        of_text,
        prediction=PredictionNames.NUMBERED,
    ),
}
