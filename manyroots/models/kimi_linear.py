"""Kimi Linear: delta attention with a decay for each channel, and a few layers of latent attention.

Nothing is rotated, including the part of keys that all heads share. Experts are those of
DeepSeek-V3, after a dense layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.layers.rotary import RopeSpec
from manyroots.layers.spec import ChannelDeltaSpec, LayerSpec, MixerSpec
from manyroots.models.architecture import LINEAR, Architecture, ConfigType, Tensors, Values, renamed
from manyroots.models.deepseek import (
    LATENT_DEFAULTS,
    finish_v3,
    latent_attention,
    sigmoid_experts,
)
from manyroots.models.fields import MAX_SIDE, shown, whole
from manyroots.models.glm4_moe_lite import DENSE, SPARSE, block_types
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert
from manyroots.models.windows import FULL

_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".self_attn.f_a_proj.": ".self_attn.forget_gate.f_a_proj.",
    ".self_attn.f_b_proj.": ".self_attn.forget_gate.f_b_proj.",
    ".self_attn.dt_bias": ".self_attn.forget_gate.dt_bias",
    ".self_attn.A_log": ".self_attn.forget_gate.A_log",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}
"""The names in the published checkpoint, and transformers' names."""


def describe(reader: ConfigReader) -> ModelSpec:
    """Kimi-Linear-48B-A3B."""
    text = reader.text
    if text.hidden_act != "silu":
        raise ModelError(
            f"the model's hidden_act is {text.hidden_act!r}; delta attention has 'silu'. Check its "
            "config.json."
        )
    _refuse_rotation(text)
    mixers: dict[str, MixerSpec] = {
        LINEAR: ChannelDeltaSpec(
            num_heads=text.linear_num_heads,
            head_dim=text.linear_head_dim,
            width=text.linear_conv_kernel_dim,
        ),
        FULL: latent_attention(text, is_interleaved=False, is_rotated=False),
    }
    kinds = reader.layer_types(mixers)
    dense, sparse = reader.dense(bias=False), sigmoid_experts(reader, count=text.num_local_experts)
    blocks = block_types(text.mlp_layer_types, text.num_hidden_layers)
    layers = [
        LayerSpec(mixers=(mixers[kind],), feed_forward=dense if block == DENSE else sparse)
        for kind, block in zip(kinds, blocks, strict=True)
    ]
    return reader.model(layers, ropes=[RopeSpec((), 1.0)])


def _refuse_rotation(text: Any) -> None:
    """A config that scales rotations means another model: this one has none to scale."""
    for field in ("rope_scaling", "rope_parameters"):
        rope = getattr(text, field, None) or {}
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
        if kind not in (None, "default"):
            raise ModelError(
                f"the model's {field} asks for {shown(kind)}; Kimi Linear rotates nothing. Remove "
                f"{field} from its config.json."
            )


def translate(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Tensors with transformers' names; separate convolutions, experts one by one."""
    return per_expert(_apart(renamed(_NAMES)(weights)))


def _apart(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        stem = name.removesuffix(".conv1d.weight")
        if stem == name:
            yield name, tensor
            continue
        for part, own in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{stem}.{part}_conv1d.weight", own


def _finish(values: Values) -> None:
    finish_v3(values)
    linear = values.get("linear_attn_config") or {}
    count = values["num_hidden_layers"]
    for field, theirs in (
        ("linear_head_dim", "head_dim"),
        ("linear_num_heads", "num_heads"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
    ):
        values[field] = linear.get(theirs, values[field])
    if values["layer_types"] is None:
        if "full_attn_layers" in linear and "kda_layers" in linear:
            full = set(linear["full_attn_layers"])  # counted from 1
            values["layer_types"] = [FULL if n + 1 in full else LINEAR for n in range(count)]
        else:
            values["layer_types"] = [FULL if n and n % 4 == 0 else LINEAR for n in range(count)]
    if values["mlp_layer_types"] is None:
        num_dense = values.get("first_k_dense_replace", 1)
        values["mlp_layer_types"] = [DENSE if n < num_dense else SPARSE for n in range(count)]


ARCHITECTURES = {
    "KimiLinearForCausalLM": Architecture(
        {
            "kimi_linear": ConfigType(
                {name: value for name, value in LATENT_DEFAULTS.items() if "rope_p" not in name}
                | {
                    "vocab_size": 163840,
                    "hidden_size": 2304,
                    "intermediate_size": 9216,
                    "moe_intermediate_size": 1024,
                    "num_hidden_layers": 27,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 32,
                    "n_shared_experts": 1,
                    "routed_scaling_factor": 2.446,
                    "q_lora_rank": None,
                    "n_group": 1,
                    "topk_group": 1,
                    "num_experts_per_tok": 8,
                    "norm_topk_prob": True,
                    "max_position_embeddings": 1048576,
                    "rms_norm_eps": 1e-5,
                    "eos_token_id": 163586,
                    "num_local_experts": 256,
                    "mlp_layer_types": None,
                    "layer_types": None,
                    "linear_head_dim": 128,
                    "linear_num_heads": 32,
                    "linear_conv_kernel_dim": 4,
                },
                _finish,
                other_names={
                    "max_position_embeddings": "model_max_length",
                    "norm_topk_prob": "moe_renormalize",
                    "n_group": "num_expert_group",
                    "num_local_experts": "num_experts",
                    "num_experts_per_tok": "num_experts_per_token",
                    "n_shared_experts": "num_shared_experts",
                },
                may_be_null=("num_key_value_heads",),
            )
        },
        describe,
        translate,
        fields={
            "linear_head_dim": whole(1, MAX_SIDE),
            "linear_num_heads": whole(1, MAX_SIDE),
        },
    ),
}
