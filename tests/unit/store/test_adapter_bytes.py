"""Bytes of an adapter's file, however they are cut, are checked and come to where they belong."""

from __future__ import annotations

import itertools
import struct
from unittest import mock

import numpy as np
import pytest
import torch

from manyroots.lora.files.digest import CHUNK_BYTES, PIECE_BYTES
from manyroots.lora.files.memory import MemoryFile
from manyroots.lora.files.pairs import Piece
from manyroots.lora.files.tensors import TensorEntry
from manyroots.store import adapter_bytes
from manyroots.store.adapter_bytes import ArrivingBytes, Moves, are_finite, places_of
from tests.helpers.other_threads import lets_others_run
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
    with mock.patch.multiple(adapter_bytes, PIECE_BYTES=chunk, _MIN_STEPS=1):
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


def test_a03_other_threads_run_while_bytes_of_an_adapter_come_to_their_places() -> None:
    """A03: steps of others are launched meanwhile. Tensors as large as those of real adapters."""
    size = 128 << 10
    tensors = [
        TensorEntry(f"{number}", "BF16", (size // 2,), number * size, (number + 1) * size)
        for number in range(PIECE_BYTES // size)
    ]
    pieces = [Piece((number,), (size // 2,)) for number in reversed(range(len(tensors)))]
    memory = np.zeros(PIECE_BYTES, np.uint8)
    moves = Moves.between(tensors, places_of(pieces, tensors))
    block = memoryview(np.ones(PIECE_BYTES, np.uint8))
    with mock.patch.object(adapter_bytes, "are_finite", return_value=True):  # releases it, too
        arriving = ArrivingBytes(memory, moves)
        assert lets_others_run(lambda: arriving.take(0, block))
    assert memory.all()


def test_a03_other_threads_run_while_an_adapter_in_memory_is_copied() -> None:
    """A03: also for an adapter that training hands over."""
    file = MemoryFile("adapter_model.safetensors", [bytes([1]) * CHUNK_BYTES])
    into = bytearray(CHUNK_BYTES)
    assert lets_others_run(lambda: file.read_into(memoryview(into), 0))
    assert all(into)


@for_seeds(200)
def test_a03_bytes_of_an_adapter_in_memory_are_those_of_its_pieces(draw: Draw) -> None:
    """A03: inside a piece without a copy, and across pieces."""
    whole = bytes(range(1, 100))
    cuts = sorted({0, len(whole), *(draw.integer(1, 98) for _ in range(draw.integer(0, 3)))})
    file = MemoryFile("weights", [whole[a:b] for a, b in itertools.pairwise(cuts)])
    first = draw.integer(0, 98)
    room = bytearray(draw.integer(1, 99 - first))
    last = first + len(room)
    found = file.bytes_at(first, memoryview(room))
    assert bytes(found) == whole[first:last]
    is_in_one = any(a <= first and last <= b for a, b in itertools.pairwise(cuts))
    assert any(room) is not is_in_one
