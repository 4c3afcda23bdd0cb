"""Bytes of an adapter's file, however they are cut, are checked and come to where they belong."""

from __future__ import annotations

import struct
from unittest import mock

import numpy as np
import pytest
import torch

from manyroots.lora.files.pairs import Piece
from manyroots.lora.files.tensors import TensorEntry
from manyroots.store import adapter_bytes
from manyroots.store.adapter_bytes import ArrivingBytes, Moves, are_finite, places_of
from tests.helpers.seeded import Draw, for_seeds


@pytest.mark.parametrize(("name", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_w12_every_number_of_two_bytes_is_told_to_be_finite_or_not(
    name: str, dtype: torch.dtype
) -> None:
    """W12: beside numbers of either sign, which must not hide it."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    wanted = every.view(dtype).isfinite().tolist()
    others = torch.tensor([-1.5, 0.0, 2.5]).to(dtype).view(torch.int16).numpy().tobytes()
    last = every.numpy().tobytes()
    for at, is_finite in zip(range(0, len(last), 2), wanted, strict=True):
        assert are_finite(memoryview(others + last[at : at + 2]), name) is is_finite


@for_seeds(2000)
def test_w12_every_number_of_four_bytes_is_told_to_be_finite_or_not(draw: Draw) -> None:
    """W12: beside numbers of either sign. Every exponent, and the fractions at its ends."""
    exponent, fraction = draw.choice((255, draw.integer(0, 255))), draw.integer(0, 2**23 - 1)
    last = (draw.flag() << 31 | exponent << 23 | fraction).to_bytes(4, "little")
    raw = struct.pack("<3f", -1.5, 0.0, 2.5) + last
    is_finite = bool(np.isfinite(np.frombuffer(last, "<f4")[0]))
    assert are_finite(memoryview(raw), "F32") is is_finite


@for_seeds(200)
def test_tensors_come_to_their_places_wherever_chunks_are_cut(draw: Draw) -> None:
    """Halves of several experts, whose tensors the file has in any order."""
    sizes = draw.list_of(lambda: draw.integer(1, 5), least=1, most=6)
    counts = [draw.integer(1, 4) for _ in sizes]
    chunk = draw.choice((2, 4, 8, 64))
    owners = [(half, nth) for half in range(len(sizes)) for nth in range(counts[half])]
    draw.shuffle(owners)
    tensors, at = [], 0
    for half, nth in owners:
        num_bytes = 8 * sizes[half]
        tensors.append(TensorEntry(f"{half}.{nth}", "F16", (4 * sizes[half],), at, at + num_bytes))
        at += num_bytes
    pieces = [
        Piece(
            tuple(owners.index((half, nth)) for nth in range(counts[half])),
            (counts[half], 4 * size),
        )
        for half, size in enumerate(sizes)
    ]
    data = np.arange(at // 2, dtype=np.int16).view(np.uint8)
    memory = np.zeros(at, np.uint8)
    with mock.patch.object(adapter_bytes, "CHUNK_BYTES", chunk):
        arriving = ArrivingBytes(memory, Moves.between(tensors, places_of(pieces, tensors)))
    for start in range(0, at, chunk):
        arriving.take(start, memoryview(data[start : start + chunk]))
    wanted = [
        data[tensors[index].start : tensors[index].end]
        for piece in pieces
        for index in piece.tensors
    ]
    assert np.array_equal(memory, np.concatenate(wanted))
    assert arriving.is_finite
