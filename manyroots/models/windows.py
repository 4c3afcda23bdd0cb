"""Attention windows by layer: how each architecture reads its config.

Each rule gives, for every layer, the most tokens that a query sees, including itself, or None for
all. In all families transformers' `sliding_window` w hides key k from query q if k <= q - w, so it
counts the query itself. The rules are those of transformers' modelling code, which differ: some use
only the window, some a type for each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyroots.errors import ModelError
from manyroots.models.fields import shown
from manyroots.models.weights.gguf_file import GGUFFile

FULL, SLIDING = "full_attention", "sliding_attention"


def of_every_layer(config: Any) -> list[int | None]:
    """`sliding_window` applies to all layers, whatever else the config has (Mistral; and Qwen3-MoE,
    whose config drops it unless it is switched on)."""
    return [_window(config.sliding_window)] * int(config.num_hidden_layers)


def of_typed_layers(config: Any) -> list[int | None]:
    """`sliding_window` applies to the layers of that type (Qwen2, Qwen3, Ministral). Configs
    without types derive them: Qwen's from `use_sliding_window` and `max_window_layers`."""
    types = config.layer_types
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise ModelError(
            f"the model's layer_types has {', '.join(unknown)}; this version serves {FULL} and "
            f"{SLIDING}. Choose another checkpoint."
        )
    if SLIDING not in types:
        return [None] * len(types)
    if config.sliding_window is None:
        raise ModelError(
            f"the model's layer_types has {SLIDING}, but there is no window: sliding_window is "
            "null or use_sliding_window is false. Set both in its config.json, or name these "
            f"layers {FULL}."
        )
    window = _window(config.sliding_window)
    return [window if kind == SLIDING else None for kind in types]


def gguf_window(file: GGUFFile) -> int:
    """A GGUF file's window; 0: none."""
    return file.whole(
        f"{file.metadata.get('general.architecture')}.attention.sliding_window", least=0, default=0
    )


def gguf_pattern(file: GGUFFile, num_layers: int, *, default: int) -> Callable[[int], bool]:
    """Which layers have a window: all but every n-th, or those in a list."""
    key = f"{file.metadata.get('general.architecture')}.attention.sliding_window_pattern"
    listed = file.metadata.get(key)
    if isinstance(listed, list):
        if len(listed) != num_layers or not all(type(one) is bool for one in listed):
            raise ModelError(
                f"{key} of {file.path} is {shown(listed)}; it must have true or false for each of "
                f"{num_layers} layers. Convert the model again."
            )
        return lambda layer: bool(listed[layer])
    period = file.whole(key, default=default)
    return lambda layer: (layer + 1) % period != 0


def _window(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ModelError(
            f"the model's sliding_window is {value}; it must be at least 1, or null for none. "
            "Correct its config.json."
        )
    return value
