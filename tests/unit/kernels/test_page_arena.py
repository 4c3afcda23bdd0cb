"""The arena's layout."""

from __future__ import annotations

import pytest
import torch

from manyroots.errors import ConfigError
from manyroots.layers.memories import KV, Latent
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


@pytest.mark.parametrize("dtype", [None, "float8_e4m3fn"])
def test_f10_a_page_of_latents_and_index_keys_is_one_contiguous_piece(dtype: str | None) -> None:
    """F10: layers see both as tensors of their own, keys in the model's dtype beside FP8 latents,
    and a page's bytes, copied, are all of it."""
    memory = Latent(20, 6, dtype, index=14, num_chosen=3)
    arena = memory.make_arena(5, 4, 3, torch.bfloat16, CPU)
    assert arena.data[3].is_contiguous()
    assert arena.data[3].nbytes == memory.unit_bytes(4, 3, torch.bfloat16)
    views = [view for layer in range(3) for view in arena.layer(layer)]
    assert [view.shape[:2] for view in views] == [(5, 4)] * 6
    assert {(view.shape[2], view.dtype) for view in views[1::2]} == {(14, torch.bfloat16)}
    for number, view in enumerate(views):
        view[1] = number + 1
    arena.data[2] = arena.data[1]
    for number, view in enumerate(views):
        assert view[2].eq(number + 1).all()
        assert view[0].eq(0).all()
    with pytest.raises(ConfigError, match=r"GiB on cpu.*--kv-cache-memory-bytes"):
        memory.make_arena(2**40, 1024, 32, torch.float32, CPU)


def test_a_layer_is_a_view_of_the_arena() -> None:
    arena = KV(1, 8, None).make_arena(4, 2, 3, torch.float32, CPU)
    arena.layer(2)[1, 0, 1] = 7.0
    assert arena.layer(2).shape == (4, 2, 2, 1, 8)
    assert arena.data[1, 2, 0, 1].eq(7.0).all()
    assert arena.data.count_nonzero() == 8


def test_an_arena_that_does_not_fit_names_its_size_and_the_flags() -> None:
    with pytest.raises(ConfigError, match=r"GiB on cpu.*--kv-cache-memory-bytes"):
        KV(8, 128, None).make_arena(2**40, 1024, 32, torch.float32, CPU)
