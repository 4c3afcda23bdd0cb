"""Copies in batches: which bytes go where, and how the driver is asked."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from manyroots.store import batched_copies
from manyroots.store.batched_copies import WHOLE_UNIT, Pieces, copy_batch, pieces
from tests.unit.store.tiers import Arena

SOURCES = np.array([3, 4, 5, 9, 8, 1], np.int32)
TARGETS = np.array([0, 1, 2, 3, 4, 5], np.int32)


def by_hand(batch: Pieces) -> None:
    for source, target, size in zip(batch.sources, batch.targets, batch.sizes, strict=True):
        ctypes.memmove(int(target), int(source), int(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("part", [WHOLE_UNIT, slice(8, 24), slice(0, 12)])
def test_t01_pieces_are_the_units_bytes_and_no_others(dtype: torch.dtype, part: slice) -> None:
    """T01: the part of each unit that is meant arrives, and the rest stays as it was."""
    source, target, before = Arena(10, dtype, 1), Arena(7, dtype, 2), Arena(7, dtype, 2)
    batch = pieces(source.data, target.data, SOURCES, TARGETS, part)
    assert len(batch.sizes) == (4 if part == WHOLE_UNIT else 6)
    by_hand(batch)
    for place in range(7):
        expected = bytearray(before.bits(place))
        if place < len(SOURCES):
            expected[part] = source.bits(int(SOURCES[place]))[part]
        assert target.bits(place) == bytes(expected)


@pytest.mark.parametrize("part", [WHOLE_UNIT, slice(8, 24)])
@pytest.mark.parametrize("driver", ["none", "refuses"])
def test_t01_without_batches_units_are_copied_one_by_one(
    part: slice, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T01: the same bytes where the driver has no such call, or refuses it."""
    call = None if driver == "none" else lambda batch, stream: 801
    monkeypatch.setattr(batched_copies, "_batch_call", lambda: call)
    stream = type("Stream", (), {"cuda_stream": 1})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    source, target, other = (Arena(10, seed=seed) for seed in (1, 2, 2))
    copy_batch(source.data, target.data, SOURCES, TARGETS, part)
    by_hand(pieces(source.data, other.data, SOURCES, TARGETS, part))
    assert torch.equal(target.data.view(torch.uint8), other.data.view(torch.uint8))


@pytest.mark.parametrize("tells_where", [False, True])
def test_the_driver_is_asked_in_its_own_form(tells_where: bool) -> None:
    """Targets, sources, sizes, count; one set of attributes for all; the stream comes last."""
    asked: list[Any] = []

    def function(*arguments: Any) -> int:
        asked.append(arguments)
        return 0

    source, target = Arena(10), Arena(10)
    batch = pieces(source.data, target.data, SOURCES, TARGETS)
    assert batched_copies._caller(function, tells_where=tells_where)(batch, 77) == 0
    [arguments] = asked
    assert len(arguments) == (9 if tells_where else 8)
    assert arguments[0].value == batch.targets.ctypes.data
    assert arguments[1].value == batch.sources.ctypes.data
    assert arguments[2].value == batch.sizes.ctypes.data
    assert [arguments[3].value, arguments[6].value, arguments[-1].value] == [4, 1, 77]
    assert ctypes.sizeof(batched_copies._Attributes) == 24
