"""Quantized tensors of GGUF files give the numbers that llama.cpp computes with, bit by bit.

The formulas are those of its `ggml-quants.c`, one block at a time. They leave no room for
rounding: 16-bit scales times small whole numbers are exact in float32, and what is added to them
is rounded once, whether or not a compiler fuses the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUFWriter, quants
from gguf import GGMLQuantizationType as Kind

from manyroots.errors import ModelError
from manyroots.models.weights.gguf_file import GGUFFile

f32 = np.float32


def half(block: bytes, at: int) -> np.float32:
    return f32(np.frombuffer(block, np.float16, count=1, offset=at)[0])


def q4_1(block: bytes) -> Iterator[np.float32]:
    scale, least, quants = half(block, 0), half(block, 2), block[4:]
    yield from (scale * f32(byte & 15) + least for byte in quants)
    yield from (scale * f32(byte >> 4) + least for byte in quants)


def q5_0(block: bytes) -> Iterator[np.float32]:
    scale, high, quants = half(block, 0), int.from_bytes(block[2:6], "little"), block[6:]
    for j, byte in enumerate(quants):
        yield scale * f32(((byte & 15) | ((high >> j) << 4 & 16)) - 16)
    for j, byte in enumerate(quants):
        yield scale * f32(((byte >> 4) | (high >> (j + 12) & 16)) - 16)


def q8_0(block: bytes) -> Iterator[np.float32]:
    yield from (half(block, 0) * f32(q) for q in np.frombuffer(block, np.int8, offset=2).tolist())


def q4_k(block: bytes) -> Iterator[np.float32]:
    scale, least, packed, quants = half(block, 0), half(block, 2), block[4:16], block[16:]

    def pair(j: int) -> tuple[np.float32, np.float32]:
        if j < 4:
            own, lower = packed[j] & 63, packed[j + 4] & 63
        else:
            own = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            lower = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        return scale * f32(own), least * f32(lower)

    for group in range(4):
        bytes_here = quants[32 * group : 32 * group + 32]
        own, lower = pair(2 * group)
        yield from (own * f32(byte & 15) - lower for byte in bytes_here)
        own, lower = pair(2 * group + 1)
        yield from (own * f32(byte >> 4) - lower for byte in bytes_here)


def q6_k(block: bytes) -> Iterator[np.float32]:
    low, high, scale = block[:128], block[128:192], half(block, 208)
    scales = np.frombuffer(block, np.int8, count=16, offset=192).tolist()
    for part in range(2):
        ql, qh = low[64 * part :][:64], high[32 * part :][:32]
        for quarter in range(4):
            for place in range(32):
                four = ql[place + 32 * (quarter % 2)] >> (4 if quarter > 1 else 0) & 15
                q = (four | (qh[place] >> 2 * quarter & 3) << 4) - 32
                own = scales[8 * part + 2 * quarter + place // 16]
                yield scale * f32(own) * f32(q)


BLOCKS: dict[Kind, tuple[Callable[[bytes], Iterator[np.float32]], int, tuple[int, ...]]] = {
    Kind.Q4_1: (q4_1, 20, (0, 2)),
    Kind.Q5_0: (q5_0, 22, (0,)),
    Kind.Q8_0: (q8_0, 34, (0,)),
    Kind.Q4_K: (q4_k, 144, (0, 2)),
    Kind.Q6_K: (q6_k, 210, (208,)),
}
"""By kind the formula, a block's bytes, and where in it are numbers of 16 bits: all kinds that
the packaged models have."""


def write(path: Path, raw: np.ndarray, kind: Kind) -> GGUFFile:
    """A file with one tensor of these bytes."""
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("some", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_are_what_llama_cpp_makes_of_them(kind: Kind, tmp_path: Path) -> None:
    formula, size, halves = BLOCKS[kind]
    rng = np.random.default_rng(12)
    num_blocks = 64
    raw = rng.integers(0, 256, (num_blocks, size), dtype=np.uint8)
    for at in halves:
        scales = rng.normal(0, 0.05, num_blocks).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(num_blocks, 2)
    ours = write(tmp_path / "m.gguf", raw.reshape(4, -1), kind).read("some")
    theirs = np.array([value for block in raw for value in formula(block.tobytes())], np.float32)
    assert ours.dtype == np.float32
    assert ours.shape == (4, len(theirs) // 4)
    assert np.array_equal(ours.reshape(-1).view(np.uint32), theirs.view(np.uint32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that no file would have
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_tensors_of_every_type_are_read_or_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    """Read as gguf's own dequantizer does; what it can't is refused with the tensor's name."""
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    raw = rng.integers(0, 256, (3, 512 // per_block * block_bytes), dtype=np.uint8)
    file = write(tmp_path / "m.gguf", raw, kind)
    try:
        theirs = quants.dequantize(raw, kind)
    except NotImplementedError:
        with pytest.raises(ModelError, match=f"'some' of .*type {kind.value},"):
            file.read("some")
        return
    ours = file.read("some")
    assert ours.shape == (3, 512)
    assert np.array_equal(ours, theirs.reshape(3, 512).astype(np.float32), equal_nan=True)
