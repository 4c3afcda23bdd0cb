"""Families: the layers of a model that remember alike.

The one place from which everything about memory follows: how many page tables a request has, what
is in an arena, what a page takes, how memory is split. Order is that of the model's layers, so
every room numbers families alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyroots.layers.spec import KV, LayerSpec


@dataclass(frozen=True, slots=True)
class LayerFamily:
    """Layers whose memory is equal."""

    memory: KV
    layers: tuple[int, ...]
    """Their places in the model, in order; a page has its parts in this order, too."""

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """What one page of `page_size` tokens takes, in all layers of the family."""
        return len(self.layers) * page_size * self.memory.token_bytes(itemsize)


def families(layers: Sequence[LayerSpec]) -> tuple[LayerFamily, ...]:
    """Those of a model, the ones that see everything first."""
    found: dict[KV, list[int]] = {}
    for index, layer in enumerate(layers):
        found.setdefault(layer.memory, []).append(index)
    ordered = sorted(found.items(), key=lambda item: item[0].window is not None)
    return tuple(LayerFamily(memory, tuple(indices)) for memory, indices in ordered)
