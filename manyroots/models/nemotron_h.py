"""Nemotron-H: a layer is only Mamba-2, attention or a feed-forward block.

Attention has no rotation. Blocks have no gate: their activation is the square of relu. Layers with
experts are not served.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.activation.kinds import Activation
from manyroots.layers.rotary import RopeSpec
from manyroots.layers.spec import AttentionSpec, DenseSpec, GatedNormKind, LayerSpec, MambaSpec
from manyroots.models.architecture import (
    KV_HEADS,
    LINEAR,
    Architecture,
    ConfigType,
    Tensors,
    Values,
    fill_kv_heads,
    renamed,
)
from manyroots.models.fields import FLAG, MAX_SIDE, NAME, POSITIVE, list_of, number, whole
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import FULL

_BLOCK = "mlp"
_PATTERN = {"M": LINEAR, "E": "moe", "*": FULL, "-": _BLOCK}
"""The letters of `hybrid_override_pattern`."""
_NAMES = {
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
}
_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}


def describe(reader: ConfigReader) -> ModelSpec:
    """Nemotron-H from 4B to 56B, Nemotron Nano v2."""
    text = reader.text
    for field, served in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if getattr(text, field) != served:
            raise ModelError(
                f"the model's {field} is {getattr(text, field)!r}; this version computes "
                f"{served!r}. Choose another checkpoint."
            )
    if text.mamba_num_heads % text.n_groups:
        raise ModelError(
            f"the model's mamba_num_heads is {text.mamba_num_heads} and its n_groups "
            f"{text.n_groups}; the first must be a multiple of the second. Check its config.json."
        )
    layers = {
        LINEAR: LayerSpec(mixers=(_mamba(reader),), feed_forward=None),
        FULL: LayerSpec(mixers=(_attention(reader),), feed_forward=None),
        _BLOCK: LayerSpec(mixers=(), feed_forward=_block(reader)),
    }
    kinds = reader.layer_types(layers)
    return reader.model(
        [layers[kind] for kind in kinds], ropes=[RopeSpec((), 1.0)], eps=text.layer_norm_epsilon
    )


def _attention(reader: ConfigReader) -> AttentionSpec:
    spec = reader.attention(qkv_bias=False, o_bias=False, qk_norm=False, window=None)
    return replace(spec, name="mixer")


def _block(reader: ConfigReader) -> DenseSpec:
    return DenseSpec(
        intermediate_size=reader.text.intermediate_size,
        activation=Activation.RELU,
        bias=reader.text.mlp_bias,
        name="mixer",
        is_gated=False,
    )


def _mamba(reader: ConfigReader) -> MambaSpec:
    text = reader.text
    return MambaSpec(
        num_heads=text.mamba_num_heads,
        head_dim=text.mamba_head_dim,
        groups=text.n_groups,
        shares_group=text.n_groups == 1,
        state_dim=text.ssm_state_size,
        width=text.conv_kernel,
        conv_bias=text.use_conv_bias,
        in_bias=text.use_bias,
        out_bias=text.use_bias,
        norm=GatedNormKind.GATE_FIRST,
        norm_groups=text.n_groups,
        least_step=text.time_step_min,
        name="mixer",
    )


def translate(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """The common names; a layer's only norm is that of its input."""
    for name, tensor in renamed(_NAMES)(weights):
        yield re.sub(r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm.", name), tensor


def _finish(values: Values) -> None:
    fill_kv_heads(values)
    for older, name in _OLDER_NAMES.items():
        if older in values:
            values[name] = values.pop(older)
    pattern = values.pop("hybrid_override_pattern", None)
    if values["layer_types"] is None:
        kinds = [LINEAR, "moe", FULL, _BLOCK]
        kinds = kinds if pattern is None else [_PATTERN[letter] for letter in pattern]
        values["layer_types"] = values["layers_block_type"] = kinds
    # For any number in the file.
    values["num_hidden_layers"] = len(values["layer_types"])


ARCHITECTURES = {
    "NemotronHForCausalLM": Architecture(
        {
            "nemotron_h": ConfigType(
                {
                    "vocab_size": 131072,
                    "hidden_size": 4096,
                    "layers_block_type": None,
                    "tie_word_embeddings": False,
                    "eos_token_id": 2,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "max_position_embeddings": 4096,
                    "attention_bias": False,
                    "sliding_window": None,
                    "intermediate_size": 21504,
                    "mlp_hidden_act": "relu2",
                    "mlp_bias": False,
                    "ssm_state_size": 128,
                    "mamba_num_heads": 128,
                    "mamba_head_dim": 64,
                    "mamba_hidden_act": "silu",
                    "n_groups": 8,
                    "conv_kernel": 4,
                    "expand": 2,
                    "time_step_min": 0.001,
                    "use_conv_bias": True,
                    "use_bias": False,
                    "layer_norm_epsilon": 1e-5,
                    "time_step_limit": (0.0, math.inf),
                    "n_routed_experts": 8,
                    "n_shared_experts": 1,
                    "moe_intermediate_size": 7688,
                    "num_experts_per_tok": 2,
                    "routed_scaling_factor": 1.0,
                    "n_group": 1,
                    "topk_group": 1,
                    "norm_topk_prob": True,
                    "mamba_proj_bias": False,
                },
                _finish,
                other_names={
                    "layers_block_type": "layer_types",
                    "n_routed_experts": "num_local_experts",
                },
                may_be_null=KV_HEADS,
            )
        },
        describe,
        translate,
        fields={
            "layers_block_type": (
                "a list of names, or null",
                lambda value: value is None or list_of(lambda one: isinstance(one, str))(value),
            ),
            "mlp_hidden_act": NAME,
            "mamba_hidden_act": NAME,
            "ssm_state_size": whole(1, MAX_SIDE),
            "mamba_num_heads": whole(1, MAX_SIDE),
            "mamba_head_dim": whole(1, MAX_SIDE),
            "n_groups": whole(1, MAX_SIDE),
            "conv_kernel": whole(2, 64),
            "time_step_min": number("a number of at least 0", lambda value: value >= 0),
            "use_conv_bias": FLAG,
            "use_bias": FLAG,
            "layer_norm_epsilon": POSITIVE,
        },
    ),
}
