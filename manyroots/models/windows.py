"""Windows of attention: what a config means, by architecture.

The rules are those of transformers' modelling code, which is not the same for all: some look at
the window alone, some at a type for each layer. Which architecture has which is in its `traits`.
"""

from __future__ import annotations

from typing import Any

from manyroots.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def of_every_layer(config: Any) -> int | None:
    """`sliding_window` is that of all layers, whatever else the config says (Mistral; and
    Qwen3-MoE, whose config drops it unless it is switched on)."""
    return _window(config.sliding_window)


def of_typed_layers(config: Any) -> int | None:
    """`sliding_window` is that of the layers whose type says so (Qwen2, Qwen3, Ministral). Configs
    without types work them out: Qwen's of `use_sliding_window` and `max_window_layers`."""
    types = config.layer_types
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise ModelError(
            f"the model's layer_types has {', '.join(unknown)}; this version serves {FULL} and "
            f"{SLIDING}. Choose another checkpoint."
        )
    if SLIDING not in types:
        return None
    if config.sliding_window is None:
        raise ModelError(
            f"the model's layer_types has {SLIDING}, but there is no window: sliding_window is "
            "null or use_sliding_window is false. Set both in its config.json, or name these "
            f"layers {FULL}."
        )
    return _window(config.sliding_window)


def _window(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ModelError(
            f"the model's sliding_window is {value}; it must be at least 1, or null for none. "
            "Correct its config.json."
        )
    return value
