"""The arena's layout."""

from __future__ import annotations

import pytest
import torch

from manyroots.errors import ConfigError
from manyroots.layers.memories import KV
from manyroots.store.arena import PART_ALIGNMENT, PartShape, StateArena, state_bytes

CPU = torch.device("cpu")


def test_a_page_of_all_layers_is_one_contiguous_piece() -> None:
    page = KV(2, 16, None).make_arena(5, 8, 3, torch.bfloat16, CPU).data[3]
    assert page.is_contiguous()
    assert page.numel() * page.itemsize == 2 * 3 * 8 * 2 * 16 * 2


PARTS = (PartShape((3, 5), torch.bfloat16), PartShape((2, 4, 2), torch.float32))


def test_f05_a_state_of_all_layers_is_one_contiguous_piece_with_aligned_parts() -> None:
    """F05: each part in the dtype that the model keeps it in."""
    arena = StateArena(4, PARTS, 2, CPU)
    assert arena.data.shape == (5, state_bytes(PARTS, 2)) == (5, 2 * (32 + 64))
    assert arena.data[arena.spare_unit].is_contiguous()
    for layer in range(2):
        for part, view in zip(PARTS, arena.layer(layer), strict=True):
            assert (view.shape[1:], view.dtype) == (part.shape, part.dtype)
            assert view.data_ptr() % PART_ALIGNMENT == arena.data.data_ptr() % PART_ALIGNMENT


def test_f05_what_layers_write_into_their_parts_overlaps_nowhere() -> None:
    """F05: and a unit's bytes, copied, are the whole state."""
    arena = StateArena(3, PARTS, 2, CPU)
    views = [view for layer in range(2) for view in arena.layer(layer)]
    for number, view in enumerate(views):
        view[1] = number + 1
    arena.data[2] = arena.data[1]
    for number, view in enumerate(views):
        assert view[2].eq(number + 1).all()
        assert view[0].eq(0).all()
    with pytest.raises(ConfigError, match=r"GiB on cpu.*--checkpoint-memory-bytes"):
        StateArena(2**40, PARTS, 32, CPU)


def test_a_layer_is_a_view_of_the_arena() -> None:
    arena = KV(1, 8, None).make_arena(4, 2, 3, torch.float32, CPU)
    arena.layer(2)[1, 0, 1] = 7.0
    assert arena.layer(2).shape == (4, 2, 2, 1, 8)
    assert arena.data[1, 2, 0, 1].eq(7.0).all()
    assert arena.data.count_nonzero() == 8


def test_an_arena_that_does_not_fit_names_its_size_and_the_flags() -> None:
    with pytest.raises(ConfigError, match=r"GiB on cpu.*--kv-cache-memory-bytes"):
        KV(8, 128, None).make_arena(2**40, 1024, 32, torch.float32, CPU)
