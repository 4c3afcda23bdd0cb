"""Families: the mixers of a model that remember alike.

The one place from which everything about memory follows: how many page tables a request has, what
is in an arena, what a unit takes, how memory is split. Families of pages come first, those that
see everything before those with a window, then families of states; every room numbers them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch

from manyroots.errors import ConfigError
from manyroots.layers.memories import KV, Latent, Memory, TokenRows
from manyroots.layers.spec import (
    AttentionSpec,
    ChannelDeltaSpec,
    CompressedSpec,
    DeltaSpec,
    LatentSpec,
    LayerSpec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
    memories_of,
)
from manyroots.models.spec import ModelSpec
from manyroots.store.arena import Arena

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
        return not self.memory.is_paged

    @property
    def window(self) -> int | None:
        """How many tokens a query sees at most; None: all, or a state of all."""
        return self.memory.window

    def unit_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """What one page of `page_size` tokens takes, or one state, in all layers of the family."""
        return self.memory.unit_bytes(page_size, len(self.layers), dtype)

    def make_arena(
        self, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Arena:
        """Memory for so many units."""
        return self.memory.make_arena(num_units, page_size, len(self.layers), dtype, device)


def with_pages_in(spec: ModelSpec, kept: str) -> ModelSpec:
    """The model with keys and values kept as `kept` says, one of --kv-cache-dtype's words."""
    if kept == AUTO:
        return spec

    def changed(mixer: MixerSpec) -> MixerSpec:
        match mixer:
            case AttentionSpec():
                return replace(mixer, memory=mixer.memory.in_dtype(FP8_PAGES))
            case LatentSpec():
                return replace(mixer, memory=mixer.memory.in_dtype(FP8_PAGES))
            case CompressedSpec():
                mixer.memories[0].in_dtype(FP8_PAGES)  # refuses it
                return mixer
            case ShortConvSpec() | DeltaSpec() | ChannelDeltaSpec() | MambaSpec():
                return mixer  # a state is no page
            case _:
                assert_never(mixer)

    layers = (replace(layer, mixers=tuple(map(changed, layer.mixers))) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def pages_in(spec: ModelSpec) -> str:
    """How a model's keys and values are kept, in the same words."""
    mixers = (mixer for layer in spec.layers for mixer in layer.mixers)
    memories = (memory for mixer in mixers for memory in memories_of(mixer))
    tokens = (memory for memory in memories if isinstance(memory, KV | Latent))
    is_fp8 = any(memory.dtype == FP8_PAGES for memory in tokens)
    return "fp8" if is_fp8 else AUTO


def check_page_size(layers: Sequence[LayerSpec], page_size: int) -> None:
    """Refuse pages that do not hold whole groups of tokens, where a model compresses groups."""
    groups = (f.memory.group for f in families(layers) if isinstance(f.memory, TokenRows))
    largest = max(groups, default=1)
    if page_size % largest:
        raise ConfigError(
            f"--block-size is {page_size}, and the model compresses groups of {largest} tokens, "
            f"which a page must hold whole; choose a multiple of {largest}."
        )


def families(layers: Sequence[LayerSpec]) -> tuple[LayerFamily, ...]:
    """Those of a model."""
    found: dict[Memory, list[int]] = {}
    for index, layer in enumerate(layers):
        for mixer in layer.mixers:
            for memory in memories_of(mixer):
                found.setdefault(memory, []).append(index)
    ordered = sorted(found.items(), key=lambda item: _order(item[0]))
    return tuple(LayerFamily(memory, tuple(indices)) for memory, indices in ordered)


def _order(memory: Memory) -> int:
    if not memory.is_paged:
        return 2
    return 0 if memory.window is None else 1
