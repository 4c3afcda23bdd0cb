"""Families: the mixers of a model with equal memory.

Everything about memory follows from this list: the page tables of a request, the content of an
arena, the size of a unit, and the split of memory. Families of pages come first, full attention
before windows, then families of states. Every room numbers them in this order.
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
    """Indexes of their layers in the model, in order; a unit has its parts in this order, too."""

    @property
    def is_state(self) -> bool:
        return not self.memory.is_paged

    @property
    def window(self) -> int | None:
        """The most tokens that a query sees; None: all, or a state of all."""
        return self.memory.window

    def unit_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of `page_size` tokens, or of one state, in all layers of the family."""
        return self.memory.unit_bytes(page_size, len(self.layers), dtype)

    def make_arena(
        self, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Arena:
        """Memory for this many units."""
        return self.memory.make_arena(num_units, page_size, len(self.layers), dtype, device)


def with_pages_in(spec: ModelSpec, kept: str) -> ModelSpec:
    """The model with keys and values stored as `kept`, a value of --kv-cache-dtype."""
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
                return mixer  # a state is not a page
            case _:
                assert_never(mixer)

    def stored(layer: LayerSpec) -> LayerSpec:
        return replace(layer, mixers=tuple(map(changed, layer.mixers)))

    prediction = spec.prediction
    if prediction is not None:
        prediction = replace(prediction, layer=stored(prediction.layer))
    return replace(spec, layers=tuple(map(stored, spec.layers)), prediction=prediction)


def pages_in(spec: ModelSpec) -> str:
    """How a model's keys and values are stored, as a value of the same flag."""
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


def model_families(spec: ModelSpec) -> tuple[LayerFamily, ...]:
    """The families of a model, with those of the layer that predicts tokens ahead."""
    prediction = spec.prediction
    return families(spec.all_layers, None if prediction is None else prediction.memory)


def families(
    layers: Sequence[LayerSpec], of_last: TokenRows | None = None
) -> tuple[LayerFamily, ...]:
    """The families of these layers. `of_last`: a memory that the last layer has beside those of its
    mixers."""
    found: dict[Memory, list[int]] = {}
    for index, layer in enumerate(layers):
        for mixer in layer.mixers:
            for memory in memories_of(mixer):
                found.setdefault(memory, []).append(index)
    if of_last is not None:
        found[of_last] = [len(layers) - 1]
    ordered = sorted(found.items(), key=lambda item: _order(item[0]))
    return tuple(LayerFamily(memory, tuple(indices)) for memory, indices in ordered)


def _order(memory: Memory) -> int:
    if not memory.is_paged:
        return 2
    return 0 if memory.window is None else 1
