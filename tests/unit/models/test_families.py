"""Families of layers: everything about memory follows from the one description of a model."""

from __future__ import annotations

import pytest
import torch

from manyroots.cache.families.attention import attention_families
from manyroots.models.decoder import Decoder
from manyroots.models.families import families
from tests.unit.models.tiny import MODELS, tiny_spec

PAGE = 4


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
        own = number - decoder.num_paged if family.is_state else number
        for index in family.layers:
            layer = decoder.layers[index]
            memories = [mixer.memory for mixer in layer.spec.mixers]
            assert layer.mixers[memories.index(family.memory)]._family == own
    counts = [len(layer.mixers) for layer in spec.layers]
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
