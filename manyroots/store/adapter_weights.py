"""An adapter's weights in host memory: one low-rank pair per target, each with its own rank.

Plain tensors by target name, in the engine's dtype, all views of one flat buffer (pinned if there
is a GPU), so that loading an adapter to the device is one copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from manyroots.ids import AdapterDigest
from manyroots.lora.files.pairs import AdapterLayout


@dataclass(frozen=True, slots=True)
class LoraPair:
    """delta(x) = scaling * B (A x)."""

    a: Tensor
    """Linear: [rank, in]. Embedding: [vocabulary, rank]. Experts: [experts or 1, rank, in]; 1 is
    shared by all."""
    b: Tensor
    """Linear and embedding: [out, rank]. Experts: [experts or 1, out, rank]."""
    scaling: float

    @property
    def rank(self) -> int:
        return int(self.b.shape[-1])


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterWeights:
    """Everything that an adapter adds to the base model. Host copies are compared by identity."""

    digest: AdapterDigest
    pairs: Mapping[str, LoraPair]
    """By target name."""
    buffer: Tensor
    """Flat memory of all pairs. Read from files, it has A of every pair, then B of every pair, in
    the order of the model's targets, so that the A of neighbours are one matrix."""
    form: AdapterLayout | None = None
    """Adapters with the same form have the same names, ranks, scalings and offsets of pairs. None
    for an adapter that was not read from files."""

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


class CutPairs(Mapping[str, LoraPair]):
    """The pairs of a buffer that was filled from files, as views made on demand: an adapter that is
    copied whole to a GPU is one of hundreds, and its pairs are never read."""

    def __init__(self, layout: AdapterLayout, buffer: Tensor) -> None:
        self._layout = layout
        self._buffer = buffer

    def __getitem__(self, target: str) -> LoraPair:
        return self._cut[target]

    def __iter__(self) -> Iterator[str]:
        return (pair.target for pair in self._layout.pairs)

    def __len__(self) -> int:
        return len(self._layout.pairs)

    @cached_property
    def _cut(self) -> dict[str, LoraPair]:
        halves, pairs = cut_halves(self._layout, self._buffer), self._layout.pairs
        return {
            pair.target: LoraPair(a, b, pair.scaling)
            for pair, a, b in zip(pairs, halves[: len(pairs)], halves[len(pairs) :], strict=True)
        }


def cut_halves(layout: AdapterLayout, buffer: Tensor) -> list[Tensor]:
    """A of every pair, then B of every pair."""
    shapes = [pair.a_shape for pair in layout.pairs] + [pair.b_shape for pair in layout.pairs]
    cut = torch.split(buffer, [math.prod(shape) for shape in shapes])
    return [flat.view(shape) for flat, shape in zip(cut, shapes, strict=True)]
