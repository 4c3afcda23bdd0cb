"""Families: the mixers of a model that remember alike.

The one place from which everything about memory follows: how many page tables a request has, what
is in an arena, what a unit takes, how memory is split. Families of pages come first, those that
see everything before those with a window, then families of states; every room numbers them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from manyroots.layers.spec import KV, AttentionSpec, LayerSpec, Memory, MixerSpec, StateMemory
from manyroots.models.spec import ModelSpec
from manyroots.store.arena import PageArena, PartShape, StateArena, state_bytes

AUTO = "auto"
FP8_PAGES = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class LayerFamily:
    """Mixers whose memory is equal."""

    memory: Memory
    layers: tuple[int, ...]
    """Their layers' places in the model, in order; a unit has its parts in this order, too."""

    @property
    def is_state(self) -> bool:
        return isinstance(self.memory, StateMemory)

    @property
    def window(self) -> int | None:
        """How many tokens a query sees at most; None: all, or a state of all."""
        return self.memory.window if isinstance(self.memory, KV) else None

    def unit_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """What one page of `page_size` tokens takes, or one state, in all layers of the family."""
        if isinstance(self.memory, StateMemory):
            return state_bytes(part_shapes(self.memory, dtype), len(self.layers))
        return (
            len(self.layers)
            * page_size
            * self.memory.token_bytes(page_dtype(self.memory, dtype).itemsize)
        )

    def make_arena(
        self, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> PageArena | StateArena:
        """Memory for so many units."""
        memory, num_layers = self.memory, len(self.layers)
        if isinstance(memory, StateMemory):
            return StateArena(num_units, part_shapes(memory, dtype), num_layers, device)
        return PageArena(
            num_units, page_size, num_layers, memory.kv_heads, memory.head_dim,
            page_dtype(memory, dtype), device,
        )  # fmt: skip


def with_pages_in(spec: ModelSpec, kept: str) -> ModelSpec:
    """The model with keys and values kept as `kept` says, one of --kv-cache-dtype's words."""
    if kept == AUTO:
        return spec

    def changed(mixer: MixerSpec) -> MixerSpec:
        if not isinstance(mixer, AttentionSpec):
            return mixer
        return replace(mixer, memory=replace(mixer.memory, dtype=FP8_PAGES))

    layers = (replace(layer, mixers=tuple(map(changed, layer.mixers))) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def pages_in(spec: ModelSpec) -> str:
    """How a model's keys and values are kept, in the same words."""
    memories = (mixer.memory for layer in spec.layers for mixer in layer.mixers)
    is_fp8 = any(isinstance(memory, KV) and memory.dtype == FP8_PAGES for memory in memories)
    return "fp8" if is_fp8 else AUTO


def page_dtype(memory: KV, dtype: torch.dtype) -> torch.dtype:
    """Of keys and values in a model of this dtype."""
    kept: torch.dtype = dtype if memory.dtype is None else getattr(torch, memory.dtype)
    return kept


def part_shapes(state: StateMemory, dtype: torch.dtype) -> tuple[PartShape, ...]:
    """What a state consists of in a model of this dtype."""
    return tuple(
        PartShape(part.shape, dtype if part.dtype is None else getattr(torch, part.dtype))
        for part in state.parts
    )


def families(layers: Sequence[LayerSpec]) -> tuple[LayerFamily, ...]:
    """Those of a model."""
    found: dict[Memory, list[int]] = {}
    for index, layer in enumerate(layers):
        for mixer in layer.mixers:
            found.setdefault(mixer.memory, []).append(index)
    ordered = sorted(found.items(), key=lambda item: _order(item[0]))
    return tuple(LayerFamily(memory, tuple(indices)) for memory, indices in ordered)


def _order(memory: Memory) -> int:
    if isinstance(memory, StateMemory):
        return 2
    return 0 if memory.window is None else 1
