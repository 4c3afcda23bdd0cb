"""The families of attention layers, by how far each looks back."""

from __future__ import annotations

from collections.abc import Sequence

from manyroots.cache.families.family import Family
from manyroots.cache.families.full import FULL_ATTENTION, FullAttention
from manyroots.cache.families.window import SlidingWindow


def attention_families(
    windows: Sequence[int | None], *, page_size: int, max_model_len: int
) -> tuple[Family, ...]:
    """One family for each kind of layer of a model. None, or a window that no sequence exceeds,
    means full attention. Names differ."""
    families: list[Family] = []
    names: list[str] = []
    for window in windows:
        sees_all = window is None or window >= max_model_len
        name = FULL_ATTENTION.name if sees_all else f"window-{window}"
        names.append(name)
        if names.count(name) > 1:
            name = f"{name}-{names.count(name)}"
        if window is None or sees_all:
            families.append(FullAttention(name))
        else:
            families.append(SlidingWindow(name, window, page_size))
    return tuple(families)
