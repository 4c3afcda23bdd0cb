"""Windows of attention, layer by layer: what a config means, by architecture.

Each rule gives, for every layer, how many tokens a query sees at most, itself included, or None
for all. Transformers' `sliding_window` w hides key k from query q where k <= q - w in all
families, so it counts the query itself already. The rules are those of its modelling code, which
is not the same for all: some look at the window alone, some at a type for each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyroots.errors import ModelError
from manyroots.models.fields import shown
from manyroots.models.weights.gguf_file import GGUFFile

FULL, SLIDING = "full_attention", "sliding_attention"


def of_every_layer(config: Any) -> list[int | None]:
    """`sliding_window` is that of all layers, whatever else the config says (Mistral; and
    Qwen3-MoE, whose config drops it unless it is switched on)."""
    return [_window(config.sliding_window)] * int(config.num_hidden_layers)


def of_typed_layers(config: Any) -> list[int | None]:
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
    """What a GGUF file says of a window; 0: there is none."""
    return file.whole(
        f"{file.metadata.get('general.architecture')}.attention.sliding_window", least=0, default=0
    )


def gguf_pattern(file: GGUFFile, num_layers: int, *, default: int) -> Callable[[int], bool]:
    """Which layers have a window: all but every so manieth, or those that a list says."""
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
