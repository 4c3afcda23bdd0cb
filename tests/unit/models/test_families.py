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
    """F02: and the decoder's layers read the table of theirs."""
    spec = tiny_spec(kind)
    found = families(spec.layers)
    assert sorted(i for family in found for i in family.layers) == list(range(spec.num_layers))
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("meta"))
    for number, family in enumerate(found):
        assert {spec.layers[i].memory for i in family.layers} == {family.memory}
        page = 2 * PAGE * family.memory.kv_heads * family.memory.head_dim * 4
        assert family.page_bytes(PAGE, 4) == page * len(family.layers)
        assert all(decoder.layers[i].family == number for i in family.layers)
    assert len({family.memory for family in found}) == len(found)
    windows = [family.memory.window for family in found]
    planes = attention_families(windows, page_size=PAGE, max_model_len=spec.max_len)
    assert [plane.is_ordered for plane in planes] == [window is None for window in windows]


def test_f02_layers_that_see_everything_are_the_first_family() -> None:
    """F02: whichever layer comes first; every room numbers families alike."""
    spec = tiny_spec("gemma3")
    first, second = families(spec.layers)
    assert spec.layers[0].memory == second.memory
    assert first.memory.window is None
    assert second.memory.window is not None
