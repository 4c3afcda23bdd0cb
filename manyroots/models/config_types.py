"""The model types whose configs are read: each one's defaults, and what it makes of its fields.

As in transformers' config classes; how a whole config is made of them is in `configs.py`. A rule
raises ValueError for fields that do not go together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyroots.models.windows import FULL, SLIDING

Values = dict[str, Any]
LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class Kind:
    """One model type: its fields' defaults, and what it makes of them."""

    defaults: Mapping[str, Any]
    finish: Callable[[Values], None] = lambda values: None
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Fields that may be written under a second name, which wins, and are read under both."""
    may_be_null: tuple[str, ...] = ()
    """Of the heads' numbers that have a default: those for which null is another way to leave
    them out."""
    theta: float = 10_000.0
    partial: float | None = None
    """How much of each head is turned unless the file says it."""
    has_ropes_by_type: bool = False
    """Whether each type of layer turns by a base of its own."""
    text: str | None = None
    """The type of the text model, where a model also sees."""


def _head_dim(values: Values) -> None:
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]


def _kv_heads(values: Values) -> None:
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]


def _whole_heads(values: Values) -> None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        raise ValueError(
            f"its hidden_size ({hidden}) is not a multiple of its num_attention_heads ({heads})."
        )


def _types(values: Values, rule: Callable[[int], str]) -> None:
    if values["layer_types"] is None:
        values["layer_types"] = [rule(layer) for layer in range(values["num_hidden_layers"])]


def _llama(values: Values) -> None:
    _head_dim(values)
    _kv_heads(values)
    _whole_heads(values)


def _mistral(values: Values) -> None:
    _head_dim(values)
    _kv_heads(values)


def _ministral(values: Values) -> None:
    _kv_heads(values)
    kind = FULL if values["sliding_window"] is None else SLIDING
    _types(values, lambda layer: kind)


def _no_window_unless_used(values: Values) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None


def _qwen(values: Values) -> None:
    _no_window_unless_used(values)
    _kv_heads(values)
    window, first = values["sliding_window"], values["max_window_layers"]
    _types(values, lambda layer: SLIDING if window is not None and layer >= first else FULL)


def _qwen3_moe(values: Values) -> None:
    _no_window_unless_used(values)
    values["mlp_only_layers"] = values["mlp_only_layers"] or []


def _gemma3(values: Values) -> None:
    if values["use_bidirectional_attention"]:
        values["sliding_window"] = values["sliding_window"] // 2 + 1
    period = values.get("sliding_window_pattern", 6)
    _types(values, lambda layer: SLIDING if (layer + 1) % period else FULL)
    _whole_heads(values)


def _gpt_oss(values: Values) -> None:
    _head_dim(values)
    _kv_heads(values)
    _types(values, lambda layer: SLIDING if (layer + 1) % 2 else FULL)
    if values["rope_parameters"] is None:
        values["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }


def _lfm2(values: Values) -> None:
    full = values["full_attn_idxs"]
    _types(values, lambda layer: FULL if full is None or layer in full else "conv")
    values["tie_word_embeddings"] = values.get("tie_embedding", values["tie_word_embeddings"])
    values["intermediate_size"] = values.get("block_ff_dim", values["intermediate_size"])


def _mamba_heads(values: Values, inner: int) -> None:
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


def _falcon_h1(values: Values) -> None:
    _kv_heads(values)
    own = values["mamba_d_ssm"]
    _mamba_heads(values, values["mamba_expand"] * values["hidden_size"] if own is None else own)
    values["mlp_multipliers"] = values["mlp_multipliers"] or [1.0] * 2
    values["ssm_multipliers"] = values["ssm_multipliers"] or [1.0] * 5


def _granite_hybrid(values: Values) -> None:
    _kv_heads(values)
    _mamba_heads(values, values["mamba_expand"] * values["hidden_size"])
    _types(values, lambda layer: LINEAR)


def _qwen3_next(values: Values) -> None:
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = values["mlp_only_layers"] or []
    period = values.get("full_attention_interval", 4)
    _types(values, lambda layer: LINEAR if (layer + 1) % period else FULL)


_KV_HEADS = ("num_key_value_heads",)
_COMMON: Values = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "eos_token_id": None,
}
_LLAMA: Values = _COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "eos_token_id": 2,
}
_MISTRAL: Values = _COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
_QWEN2: Values = _COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_DELTA_NETS: Values = _COMMON | {
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
_MAMBA: Values = {
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

KINDS: dict[str, Kind] = {
    "llama": Kind(_LLAMA | {"mlp_bias": False, "head_dim": None}, _llama),
    "mistral": Kind(_MISTRAL, _mistral),
    "ministral": Kind(_MISTRAL | {"layer_types": None}, _ministral),
    "qwen2": Kind(_QWEN2, _qwen, may_be_null=_KV_HEADS),
    "qwen3": Kind(
        _QWEN2 | {"head_dim": 128, "attention_bias": False}, _qwen, may_be_null=_KV_HEADS
    ),
    "qwen3_moe": Kind(
        _COMMON
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        _qwen3_moe,
        other_names={"num_experts": "num_local_experts"},
    ),
    "gemma3_text": Kind(
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
            "rope_parameters": None,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": None,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        _gemma3,
        theta=1_000_000.0,
        has_ropes_by_type=True,
    ),
    "gemma3": Kind({"tie_word_embeddings": True}, text="gemma3_text"),
    "gpt_oss": Kind(
        _COMMON
        | {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "layer_types": None,
        },
        _gpt_oss,
        other_names={"num_local_experts": "num_experts"},
        theta=150_000.0,
    ),
    "lfm2": Kind(
        {
            "vocab_size": 65536,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            "rope_parameters": None,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "full_attn_idxs": None,
            "layer_types": None,
        },
        _lfm2,
        theta=1_000_000.0,
    ),
    "falcon_h1": Kind(
        _LLAMA
        | _MAMBA
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
        _falcon_h1,
        may_be_null=_KV_HEADS,
    ),
    "granitemoehybrid": Kind(
        _LLAMA
        | _MAMBA
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
        _granite_hybrid,
        other_names={"layer_types": "layers_block_type"},
    ),
    "qwen3_next": Kind(
        _DELTA_NETS
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
        _qwen3_next,
        partial=0.25,
    ),
    "qwen3_5_text": Kind(
        _DELTA_NETS
        | {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
        _qwen3_next,
        partial=0.25,
    ),
    "qwen3_5": Kind({"tie_word_embeddings": False}, text="qwen3_5_text"),
    "qwen3_5_moe_text": Kind(
        _DELTA_NETS
        | {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        _qwen3_next,
        partial=0.25,
    ),
    "qwen3_5_moe": Kind({"tie_word_embeddings": False}, text="qwen3_5_moe_text"),
}
