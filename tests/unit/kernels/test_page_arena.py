"""The arena's layout."""

from __future__ import annotations

import pytest
import torch

from manyroots.errors import ConfigError
from manyroots.models.families import families
from manyroots.store.arena import PageArena
from tests.unit.models.tiny import tiny_spec

CPU = torch.device("cpu")


def test_a_page_of_all_layers_is_one_contiguous_piece_of_page_bytes() -> None:
    [family] = families(tiny_spec().layers)
    memory = family.memory
    arena = PageArena(
        5, 8, len(family.layers), memory.kv_heads, memory.head_dim, torch.bfloat16, CPU
    )
    page = arena.data[3]
    assert page.is_contiguous()
    assert page.numel() * page.itemsize == family.page_bytes(8, torch.bfloat16.itemsize)


def test_a_layer_is_a_view_of_the_arena() -> None:
    arena = PageArena(4, 2, 3, 1, 8, torch.float32, CPU)
    arena.layer(2)[1, 0, 1] = 7.0
    assert arena.layer(2).shape == (4, 2, 2, 1, 8)
    assert arena.data[1, 2, 0, 1].eq(7.0).all()
    assert arena.data.count_nonzero() == 8


def test_an_arena_that_does_not_fit_names_its_size_and_the_flags() -> None:
    with pytest.raises(ConfigError, match=r"GiB on cpu.*--kv-cache-memory-bytes"):
        PageArena(2**40, 1024, 32, 8, 128, torch.float32, CPU)
