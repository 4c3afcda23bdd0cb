"""Every number and name that is read from a config, with what it may be: the one place.

Takes a config's fields, as a file has them or as they are completed; raises a ModelError
that names the field, its value and what it may be. Done before anything is made of them: a config
class makes a list as long as there are layers, and a model memory as large as its sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from manyroots.errors import ModelError

Check = Callable[[Any], bool]
Field = tuple[str, Check]
"""What it must be, in words, and whether a value is that."""

MAX_LAYERS = 10_000
MAX_SIDE = 2**26
"""Of a weight other than the vocabulary. What is below and still too large is seen by its bytes."""
MAX_VOCAB = 2**31 - 1
"""Token ids are 32-bit numbers on the device."""


def _whole(least: int, most: int | None, *, or_none: bool = False) -> Field:
    end = f"of at least {least}" if most is None else f"between {least} and {most}"
    words = f"a whole number {end}" + (", or null" if or_none else "")

    def check(value: Any) -> bool:
        if value is None:
            return or_none
        return type(value) is int and value >= least and (most is None or value <= most)

    return words, check


def _finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def _number(words: str, check: Check, *, or_none: bool = False) -> Field:
    return words, lambda value: (or_none and value is None) or (_finite(value) and check(value))


def _list_of(item: Check) -> Check:
    return lambda value: isinstance(value, list) and all(item(one) for one in value)


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _numbers(count: int) -> Field:
    return (
        f"a list of {count} numbers, or null",
        lambda value: value is None or (_list_of(_finite)(value) and len(value) == count),
    )


_FLAG: Field = ("true or false", lambda value: type(value) is bool)
_NAME: Field = ("a name", lambda value: isinstance(value, str))
TOKENS: Field = (
    "a token id, a list of token ids, or null",
    lambda value: value is None or _is_token(value) or _list_of(_is_token)(value),
)

_POSITIVE = _number("a number above 0", lambda value: value > 0)

FIELDS: dict[str, Field] = {
    "model_type": _NAME,
    "architectures": (
        "a list with the name of the architecture",
        lambda value: (
            value is None or (_list_of(lambda one: isinstance(one, str))(value) and len(value) > 0)
        ),
    ),
    "vocab_size": _whole(1, MAX_VOCAB),
    "hidden_size": _whole(1, MAX_SIDE),
    "intermediate_size": _whole(1, MAX_SIDE),
    "num_hidden_layers": _whole(1, MAX_LAYERS),
    "num_attention_heads": _whole(1, MAX_SIDE),
    "num_key_value_heads": _whole(1, MAX_SIDE, or_none=True),
    "head_dim": (
        f"an even number between 2 and {MAX_SIDE}, or null",
        lambda value: (
            value is None or (type(value) is int and 2 <= value <= MAX_SIDE and value % 2 == 0)
        ),
    ),
    # As large as it likes: a server's context ends where its memory does.
    "max_position_embeddings": _whole(1, None),
    "rms_norm_eps": _number("a number between 0 and 1", lambda value: 0 <= value <= 1),
    "hidden_act": _NAME,
    "hidden_activation": _NAME,
    "query_pre_attn_scalar": _POSITIVE,
    "swiglu_limit": _POSITIVE,
    # Transformers' masks follow it, of whatever model: embedders made of decoders say false.
    "is_causal": (
        "true: what sees the tokens behind it can't generate",
        lambda value: value is True,
    ),
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "use_sliding_window": _FLAG,
    "sliding_window": (
        "a whole number, or null",
        lambda value: value is None or type(value) is int,
    ),  # what it may be where it counts, `windows.py` says
    "max_window_layers": ("a whole number", lambda value: type(value) is int),
    "layer_types": (
        "a list of names, or null",
        lambda value: value is None or _list_of(lambda one: isinstance(one, str))(value),
    ),
    "num_experts": _whole(0, MAX_SIDE),
    "num_local_experts": _whole(0, MAX_SIDE),  # another name for it, which transformers prefers
    "num_experts_per_tok": _whole(0, MAX_SIDE),
    "moe_intermediate_size": _whole(1, MAX_SIDE),
    "norm_topk_prob": _FLAG,
    "decoder_sparse_step": _whole(0, MAX_LAYERS),
    "mlp_only_layers": (
        "a list of layers, or null",
        lambda value: value is None or _list_of(lambda one: type(one) is int)(value),
    ),
    "eos_token_id": TOKENS,
    "linear_conv_kernel_dim": _whole(2, 64),
    "linear_key_head_dim": _whole(1, MAX_SIDE),
    "linear_value_head_dim": _whole(1, MAX_SIDE),
    "linear_num_key_heads": _whole(1, MAX_SIDE),
    "linear_num_value_heads": _whole(1, MAX_SIDE),
    "shared_expert_intermediate_size": _whole(1, MAX_SIDE),
    "shared_intermediate_size": _whole(1, MAX_SIDE),
    "mamba_n_heads": _whole(1, MAX_SIDE),
    "mamba_d_head": (
        f"a whole number between 1 and {MAX_SIDE}, or 'auto'",
        lambda value: value == "auto" or (type(value) is int and 1 <= value <= MAX_SIDE),
    ),
    "mamba_n_groups": _whole(1, MAX_SIDE),
    "mamba_d_state": _whole(1, MAX_SIDE),
    "mamba_d_conv": _whole(2, 64),
    "mamba_d_ssm": _whole(1, MAX_SIDE, or_none=True),
    "mamba_expand": _POSITIVE,
    "mamba_conv_bias": _FLAG,
    "mamba_proj_bias": _FLAG,
    "mamba_rms_norm": _FLAG,
    "mamba_norm_before_gate": _FLAG,
    "projectors_bias": _FLAG,
    "position_embedding_type": (
        "'rope', 'nope' or null",
        lambda value: value in ("rope", "nope", None),
    ),
    "embedding_multiplier": _POSITIVE,
    "attention_multiplier": _POSITIVE,
    "residual_multiplier": _POSITIVE,
    "logits_scaling": _POSITIVE,
    "lm_head_multiplier": _POSITIVE,
    "key_multiplier": _POSITIVE,
    "attention_in_multiplier": _POSITIVE,
    "attention_out_multiplier": _POSITIVE,
    "ssm_in_multiplier": _POSITIVE,
    "ssm_out_multiplier": _POSITIVE,
    "mlp_multipliers": _numbers(2),
    "ssm_multipliers": _numbers(5),
    "norm_eps": _number("a number between 0 and 1", lambda value: 0 <= value <= 1),
    "conv_L_cache": _whole(2, 64),
    "conv_bias": _FLAG,
    "block_auto_adjust_ff_dim": _FLAG,
    "block_multiple_of": _whole(1, MAX_SIDE),
    "block_ffn_dim_multiplier": _number(
        "a number above 0, or null", lambda value: value > 0, or_none=True
    ),
}

WRITTEN_FIELDS: dict[str, Field] = FIELDS | {
    "per_layer_config": ("empty: layers that differ here are told by layer_types", lambda v: not v),
    "quantization_config": ("an object, or null", lambda v: v is None or isinstance(v, dict)),
    "transformers_weights": ("absent: weights are read from the usual files", lambda v: v is None),
}
"""Those of a config.json: some have another meaning once it is completed."""

_POSITIVE_OR_NONE = _number("a number above 0, or null", lambda value: value > 0, or_none=True)
ROPE_FIELDS: dict[str, Field] = {
    "rope_type": _NAME,
    "rope_theta": _POSITIVE,
    # Null where the type has no use for it; where it has, computing with it is refused.
    "factor": _POSITIVE_OR_NONE,
    "low_freq_factor": _POSITIVE_OR_NONE,
    "high_freq_factor": _POSITIVE_OR_NONE,
    "original_max_position_embeddings": _whole(1, None, or_none=True),
    "attention_factor": _POSITIVE_OR_NONE,
    "beta_fast": _POSITIVE_OR_NONE,
    "beta_slow": _POSITIVE_OR_NONE,
    "mscale": _number("a number, or null", lambda value: True, or_none=True),
    "mscale_all_dim": _number("a number, or null", lambda value: True, or_none=True),
    "truncate": _FLAG,
    "partial_rotary_factor": _number("a number between 0 and 1", lambda value: 0 < value <= 1),
}


def check_fields(
    values: Mapping[str, Any], where: str, fields: Mapping[str, Field] = FIELDS
) -> None:
    """Refuse the first of `values` that is not what it must be; what is absent has a default."""
    for name, (words, check) in fields.items():
        if name in values and not check(values[name]):
            raise ModelError(
                f"{name} of {where} is {shown(values[name])}; it must be {words}. Correct it, or "
                "use another checkpoint."
            )


def check_config(config: Any, where: str) -> None:
    """The same of a completed config: a model's own, or its text model's."""
    values = {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}
    check_fields(values, where)


def check_rope(parameters: Any, where: str) -> None:
    """Of `rope_parameters`: one set of numbers, which all layers share."""
    if not isinstance(parameters, Mapping):
        raise ModelError(
            f"rope_parameters of {where} is {shown(parameters)}; it must be an object with "
            "rope_type and rope_theta. Correct it."
        )
    nested = sorted(str(name) for name, value in parameters.items() if isinstance(value, Mapping))
    if nested:
        raise ModelError(
            f"rope_parameters of {where} is given by type of layer ({', '.join(nested)[:200]}); "
            "this version serves models whose layers share one. Choose another checkpoint."
        )
    if "rope_theta" not in parameters:
        raise ModelError(
            f"rope_parameters of {where} is {shown(dict(parameters))} and lacks rope_theta; "
            "complete it."
        )
    check_fields(parameters, f"the rope_parameters of {where}", ROPE_FIELDS)


def shown(value: Any) -> str:
    """Short enough for a message, whatever it is."""
    if type(value) is int and value.bit_length() > 300:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (list, dict)) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
