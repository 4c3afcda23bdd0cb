"""Families of layers: everything about memory follows from the one description of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyroots.cache.families.attention import attention_families
from manyroots.kernels.choice import Kernels, kernels_for
from manyroots.layers.compressed_attention import CompressedAttention
from manyroots.layers.memories import StepRows
from manyroots.layers.spec import MixerSpec, memories_of
from manyroots.models.decoder import Decoder
from manyroots.models.families import LayerFamily, families, with_pages_in
from manyroots.models.kernel_set import check_step, why_not_triton
from manyroots.store.arena import Arena, PageArena
from tests.unit.models.tiny import MODELS, tiny_spec

PAGE = 4


def numbers_of(mixer: Any, spec: MixerSpec, family: LayerFamily) -> list[int]:
    """Which of the step's memories a mixer reads as this family's."""
    numbers = mixer._families if isinstance(mixer, CompressedAttention) else (mixer._family,)
    both = zip(numbers, memories_of(spec), strict=True)
    return [number for number, memory in both if memory == family.memory]


@pytest.mark.parametrize("kind", MODELS)
def test_f02_every_layer_is_in_one_family_of_those_that_remember_alike(kind: str) -> None:
    """F02: and the decoder's layers read the table, or the states, of theirs."""
    spec = tiny_spec(kind)
    found = families(spec.layers)
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("meta"))
    arenas = [family.make_arena(3, PAGE, torch.float32, decoder.device) for family in found]
    for number, (family, arena) in enumerate(zip(found, arenas, strict=True)):
        assert family.unit_bytes(PAGE, torch.float32) == arena.data[0].numel() * arena.data.itemsize
        assert family.is_state == (number >= decoder.num_paged)
        for index in family.layers:
            layer = decoder.layers[index]
            both = zip(layer.mixers, layer.spec.mixers, strict=True)
            assert number in {n for mixer, own in both for n in numbers_of(mixer, own, family)}
    counts = [len(memories_of(mixer)) for layer in spec.layers for mixer in layer.mixers]
    assert sum(len(family.layers) for family in found) == sum(counts)
    assert len({family.memory for family in found}) == len(found)
    windows = [family.window for family in found if not family.is_state]
    planes = attention_families(windows, page_size=PAGE, max_model_len=spec.max_len)
    assert [plane.is_ordered for plane in planes] == [window is None for window in windows]


def test_f02_layers_that_see_everything_are_the_first_family() -> None:
    """F02: whichever layer comes first; every room numbers families alike."""
    spec = tiny_spec("gemma3")
    first, second = families(spec.layers)
    assert spec.layers[0].mixers[0].memory == second.memory
    assert first.window is None
    assert second.window is not None


@dataclass(frozen=True)
class Vector:
    """A memory of one vector for each token and layer, made up here: what a new kind has to say."""

    size: int
    is_paged = True
    may_pad_prompts = True
    window = None

    def in_dtype(self, dtype: str) -> Vector:
        return self

    def unit_bytes(self, page_size: int, num_layers: int, dtype: torch.dtype) -> int:
        return num_layers * page_size * self.size * dtype.itemsize

    def units_read(self, context: float) -> float:
        return context

    def make_arena(
        self,
        num_units: int,
        page_size: int,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Arena:
        return PageArena(num_units, page_size, num_layers, (page_size, self.size), dtype, device)

    def prepare(self, rows: StepRows, place: int, kernels: Kernels, dtype: torch.dtype) -> Any:
        return rows.page_tables[place]


@dataclass(frozen=True)
class VectorSpec:
    memory: Vector
    name: str = "vector"


def with_vectors() -> Any:
    """Llama's layers, the last of which has a mixer that no other room knows."""
    spec = tiny_spec("llama")
    mixers: Any = (VectorSpec(Vector(24)),)
    return replace(spec, layers=(*spec.layers[:-1], replace(spec.layers[-1], mixers=mixers)))


def test_f02_a_new_kind_of_memory_makes_its_own_arena_and_step_inputs() -> None:
    """F02: neither families nor arenas know what a kind keeps."""
    keys, latents = families(with_vectors().layers)
    assert not latents.is_state
    arena = latents.make_arena(3, PAGE, torch.float32, torch.device("cpu"))
    assert arena.layer(0).shape == (3, PAGE, 24)
    assert latents.unit_bytes(PAGE, torch.float32) == arena.data[0].nbytes
    tables = torch.arange(6, dtype=torch.int32).view(2, 3, 1)
    of_step: Any = SimpleNamespace(page_tables=tables)
    kernels = kernels_for(torch.device("cpu"))
    given = latents.memory.prepare(of_step, 1, kernels, torch.float32)
    assert torch.equal(given, tables[1])
    assert keys.window is None


@pytest.mark.parametrize(
    "check",
    [
        why_not_triton,
        lambda spec: with_pages_in(spec, "fp8"),
        lambda spec: check_step(spec, torch.device("cuda"), max_num_tokens=64, max_num_rows=4),
    ],
    ids=["kernels", "pages in FP8", "steps"],
)
def test_f02_a_check_that_does_not_know_a_mixer_says_so(check: Callable[[Any], object]) -> None:
    """F02: instead of passing over it; the type checker names the same places."""
    with pytest.raises(AssertionError, match="VectorSpec"):
        check(replace(with_vectors(), layers=with_vectors().layers[-1:]))
