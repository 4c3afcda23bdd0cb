"""Allowed values of config fields that several architectures read.

Takes a config's fields, as written or completed; raises a ModelError that names the field, its
value and the allowed values. This happens before they are used: a config class makes a list with an
entry per layer, and a model allocates memory by its sizes. Fields of one architecture are in its
file; `registry.py` has all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from manyroots.errors import ModelError

Check = Callable[[Any], bool]
Field = tuple[str, Check]
"""A description of the allowed values, and the check."""

MAX_LAYERS = 10_000
MAX_SIDE = 2**26
"""Largest side of a weight, except the vocabulary. Smaller models that are still too large are
refused by their bytes."""
MAX_VOCAB = 2**31 - 1
"""Token ids are 32-bit numbers on the device."""


def whole(least: int, most: int | None, *, or_none: bool = False) -> Field:
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


def number(words: str, check: Check, *, or_none: bool = False) -> Field:
    return words, lambda value: (or_none and value is None) or (_finite(value) and check(value))


def list_of(item: Check) -> Check:
    return lambda value: isinstance(value, list) and all(item(one) for one in value)


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def numbers(count: int) -> Field:
    return (
        f"a list of {count} numbers, or null",
        lambda value: value is None or (list_of(_finite)(value) and len(value) == count),
    )


FLAG: Field = ("true or false", lambda value: type(value) is bool)
NAME: Field = ("a name", lambda value: isinstance(value, str))
TOKENS: Field = (
    "a token id, a list of token ids, or null",
    lambda value: value is None or _is_token(value) or list_of(_is_token)(value),
)

NAMES: Field = (
    "a list of names, or null",
    lambda value: value is None or list_of(lambda one: isinstance(one, str))(value),
)
POSITIVE = number("a number above 0", lambda value: value > 0)

FIELDS: dict[str, Field] = {
    "model_type": NAME,
    "architectures": (
        "a list with the name of the architecture",
        lambda value: (
            value is None or (list_of(lambda one: isinstance(one, str))(value) and len(value) > 0)
        ),
    ),
    "vocab_size": whole(1, MAX_VOCAB),
    "hidden_size": whole(1, MAX_SIDE),
    "intermediate_size": whole(1, MAX_SIDE),
    "num_hidden_layers": whole(1, MAX_LAYERS),
    "num_attention_heads": whole(1, MAX_SIDE),
    "num_key_value_heads": whole(1, MAX_SIDE, or_none=True),
    "head_dim": (
        f"an even number between 2 and {MAX_SIDE}, or null",
        lambda value: (
            value is None or (type(value) is int and 2 <= value <= MAX_SIDE and value % 2 == 0)
        ),
    ),
    # Any size: memory limits a server's context.
    "max_position_embeddings": whole(1, None),
    "rms_norm_eps": number("a number between 0 and 1", lambda value: 0 <= value <= 1),
    "hidden_act": NAME,
    # Transformers' masks follow it for every model: embedders made from decoders set it to false.
    "is_causal": (
        "true: a model that sees later tokens can't generate",
        lambda value: value is True,
    ),
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "use_sliding_window": FLAG,
    "sliding_window": (
        "a whole number, or null",
        lambda value: value is None or type(value) is int,
    ),  # what it may be where it counts, `windows.py` says
    "layer_types": NAMES,
    "mlp_layer_types": NAMES,
    "swiglu_limit": POSITIVE,
    "num_experts": whole(0, MAX_SIDE),
    "num_local_experts": whole(0, MAX_SIDE),  # another name for it, which transformers prefers
    "num_experts_per_tok": whole(0, MAX_SIDE),
    "moe_intermediate_size": whole(1, MAX_SIDE),
    "norm_topk_prob": FLAG,
    "n_shared_experts": whole(1, MAX_SIDE),
    "n_routed_experts": whole(1, MAX_SIDE),
    "routed_scaling_factor": POSITIVE,
    "n_group": whole(1, MAX_SIDE, or_none=True),
    "topk_group": whole(1, MAX_SIDE, or_none=True),
    "first_k_dense_replace": whole(0, MAX_LAYERS),
    "index_n_heads": whole(1, MAX_SIDE),
    "index_head_dim": whole(2, MAX_SIDE),
    "index_topk": whole(1, MAX_SIDE),
    "eos_token_id": TOKENS,
    "embedding_multiplier": POSITIVE,
}

WRITTEN_FIELDS: dict[str, Field] = {
    "per_layer_config": ("empty: layers that differ here are told by layer_types", lambda v: not v),
    "quantization_config": ("an object, or null", lambda v: v is None or isinstance(v, dict)),
    "transformers_weights": ("absent: weights are read from the usual files", lambda v: v is None),
}
"""Fields of a config.json only."""

POSITIVE_OR_NONE = number("a number above 0, or null", lambda value: value > 0, or_none=True)
_FACTORS: Field = (
    "a list of numbers above 0",
    list_of(lambda one: _finite(one) and one > 0),
)
ROPE_FIELDS: dict[str, Field] = {
    "rope_type": NAME,
    "rope_theta": POSITIVE,
    # Null if the type does not use it; otherwise computing with it is refused.
    "factor": POSITIVE_OR_NONE,
    "low_freq_factor": POSITIVE_OR_NONE,
    "high_freq_factor": POSITIVE_OR_NONE,
    "original_max_position_embeddings": whole(1, None, or_none=True),
    "attention_factor": POSITIVE_OR_NONE,
    "beta_fast": POSITIVE_OR_NONE,
    "beta_slow": POSITIVE_OR_NONE,
    "mscale": number("a number, or null", lambda value: True, or_none=True),
    "mscale_all_dim": number("a number, or null", lambda value: True, or_none=True),
    "truncate": FLAG,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    "partial_rotary_factor": number("a number between 0 and 1", lambda value: 0 < value <= 1),
}


def check_fields(values: Mapping[str, Any], where: str, fields: Mapping[str, Field]) -> None:
    """Refuse the first invalid value; missing fields have defaults."""
    for name, (words, check) in fields.items():
        if name in values and not check(values[name]):
            raise ModelError(
                f"{name} of {where} is {shown(values[name])}; it must be {words}. Correct it, or "
                "use another checkpoint."
            )


def check_rope(parameters: Any, where: str) -> None:
    """Check `rope_parameters`: one set of numbers, which all layers share."""
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
    """Any value, short enough for a message."""
    if type(value) is int and value.bit_length() > 300:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (list, dict)) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
