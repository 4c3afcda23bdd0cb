"""Reads an adapter from its folder into host memory, and checks it.

Takes a folder and the model's targets; gives the adapter's spec and its weights in canonical form,
in the engine's dtype, in one flat buffer. `lora/files` checks names, shapes and options before any
weight is read. This module handles only the bytes: they are read and hashed once, in threads, and
moved only if the file has another layout.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manyroots.errors import AdapterError, ManyrootsError
from manyroots.lora.files.digest import content_digest, read_and_hash
from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE, check_folder, find_file
from manyroots.lora.files.header import Header
from manyroots.lora.files.opened import AdapterFile
from manyroots.lora.files.pairs import Piece
from manyroots.lora.spec import AdapterSpec
from manyroots.lora.targets import Targets
from manyroots.store.adapter_base import BaseRows, check_copy
from manyroots.store.adapter_bytes import ArrivingBytes, Moves
from manyroots.store.adapter_layouts import (
    FILE_DTYPES,
    MAX_KEPT,
    FileLayout,
    Layouts,
    pieces_of,
)
from manyroots.store.adapter_weights import AdapterWeights, CutPairs, cut_halves
from manyroots.store.host_memory import Allocate, pageable

_NUM_COPY_THREADS = 4


def read_adapter(
    path: Path,
    targets: Targets,
    *,
    max_rank: int,
    dtype: torch.dtype,
    vocab_size: int,
    allowed_dirs: Sequence[Path] | None = None,
    base: Mapping[str, BaseRows] | None = None,
) -> tuple[AdapterSpec, AdapterWeights]:
    """Read and check one PEFT folder; raises AdapterError if it cannot be served.

    With `allowed_dirs`, the files must be in one of them after links are resolved. `base`: weights
    of the model that files may repeat, by target.
    """
    layouts = Layouts(targets, max_rank=max_rank, dtype=dtype, vocab_size=vocab_size)
    return read_folder(path, layouts, allowed_dirs=allowed_dirs, base=base)


def read_folder(
    path: Path,
    layouts: Layouts,
    *,
    allowed_dirs: Sequence[Path] | None = None,
    allocate: Allocate = pageable,
    base: Mapping[str, BaseRows] | None = None,
) -> tuple[AdapterSpec, AdapterWeights]:
    """Read one of many adapters. `allocate` gives the memory for the weights."""
    folder = check_folder(path, allowed_dirs)
    with (
        AdapterFile(find_file(folder, CONFIG_FILE, allowed_dirs)) as config_file,
        AdapterFile(find_file(folder, WEIGHTS_FILE, allowed_dirs)) as weights_file,
    ):
        return read_files(config_file, weights_file, layouts, allocate=allocate, base=base)


def read_files(
    config_file: AdapterFile,
    weights_file: AdapterFile,
    layouts: Layouts,
    *,
    allocate: Allocate = pageable,
    base: Mapping[str, BaseRows] | None = None,
) -> tuple[AdapterSpec, AdapterWeights]:
    """The same for open files, or files in memory."""
    with _without_collector():
        files = layouts.of(config_file, weights_file)
        if files.moves is not None:
            found = _read_into_place(weights_file, files, files.moves, layouts.dtype, allocate)
        else:
            found = _read_and_convert(weights_file, files, layouts.dtype, allocate, base or {})
        weights_file.check_unchanged()
        config_file.check_unchanged()
    digest = content_digest(files.config.canonical(), files.header, found.hashes)
    pairs = CutPairs(files.layout, found.buffer)
    weights = AdapterWeights(digest, pairs, found.buffer, files.layout)
    if not found.is_finite:
        _check_finite(weights)
    return _spec(weights, files), weights


def foresee(folders: Sequence[str], layouts: Layouts) -> None:
    """Describe these folders, as far as descriptions are cached, without reading a weight. The
    first request for one of them, or for a similar one, then waits only for its bytes. Unsupported
    adapters are reported on their first use."""
    for folder in folders[:MAX_KEPT]:
        with contextlib.suppress(ManyrootsError, OSError), _without_collector():
            path = check_folder(Path(folder), None)
            with (
                AdapterFile(find_file(path, CONFIG_FILE, None)) as config_file,
                AdapterFile(find_file(path, WEIGHTS_FILE, None)) as weights_file,
            ):
                layouts.of(config_file, weights_file)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A file may have tens of thousands of tensors, all described at once and none of it garbage.
    The garbage collector would scan them repeatedly, for half of the time (measured)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _spec(weights: AdapterWeights, files: FileLayout) -> AdapterSpec:
    return AdapterSpec(
        digest=weights.digest,
        rank=max(pair.rank for pair in files.spec_pairs),
        num_bytes=weights.num_bytes,
        pairs=files.spec_pairs,
        invocation_tokens=files.config.invocation_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """The content of a file."""

    hashes: list[bytes]
    buffer: Tensor
    is_finite: bool
    """False if a number is not finite, or if none was checked."""


def _read_into_place(
    file: AdapterFile, files: FileLayout, moves: Moves, dtype: torch.dtype, allocate: Allocate
) -> _Found:
    """Every byte is copied once, from the file through a chunk to its destination."""
    buffer = allocate(files.header.data_bytes)
    arriving = ArrivingBytes(buffer.numpy(), moves)
    hashes = read_and_hash(file, files.header, None, arriving.take)
    return _Found(hashes, buffer.view(dtype), arriving.is_finite)


def _read_and_convert(
    file: AdapterFile,
    files: FileLayout,
    dtype: torch.dtype,
    allocate: Allocate,
    base: Mapping[str, BaseRows],
) -> _Found:
    header, layout = files.header, files.layout
    raw = pageable(header.data_bytes)
    hashes = read_and_hash(file, header, raw.numpy().data)
    tensors = _tensors(raw, header, dtype)
    for target, index in layout.base_copies:
        if target in base:
            entry = header.tensors[index]
            check_copy(entry.name, tensors[index].view(entry.shape), base[target])
    size = sum(math.prod(pair.a_shape) + math.prod(pair.b_shape) for pair in layout.pairs)
    buffer = allocate(size * dtype.itemsize).view(dtype)
    halves = cut_halves(layout, buffer)
    # Torch copies many small tensors on one core.
    with ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="adapter-copy") as threads:
        copied = threads.map(
            lambda half, piece: _copy(half, piece, tensors), halves, pieces_of(layout)
        )
        for _ in copied:
            pass
    return _Found(hashes, buffer, is_finite=False)


def _tensors(raw: Tensor, header: Header, dtype: torch.dtype) -> list[Tensor]:
    """All tensors of the file, flat, in the engine's dtype and in the header's order.

    Runs of one dtype are converted and split in one call each: files have tens of thousands of
    tensors.
    """
    found: list[Tensor] = []
    entries = header.tensors
    first = 0
    while first < len(entries):
        last = first
        while last < len(entries) and entries[last].dtype == entries[first].dtype:
            last += 1
        run = entries[first:last]
        file_dtype = FILE_DTYPES[run[0].dtype]
        piece = raw[run[0].start : run[-1].end]
        if run[0].start % file_dtype.itemsize:
            piece = piece.clone()
        sizes = [(entry.end - entry.start) // file_dtype.itemsize for entry in run]
        found += torch.split(piece.view(file_dtype).to(dtype), sizes)
        first = last
    return found


def _copy(place: Tensor, piece: Piece, tensors: list[Tensor]) -> None:
    if len(piece.tensors) > 1:
        torch.cat([tensors[index] for index in piece.tensors], out=place.view(-1))
        return
    source = tensors[piece.tensors[0]].view(piece.shape)
    if piece.axes is not None:
        source = source.permute(piece.axes)
    if piece.rows is not None:
        source = source[..., piece.rows, :]
    place.copy_(source)


def _check_finite(weights: AdapterWeights) -> None:
    """Checked after the conversion: a number may exceed only the range of the engine's dtype."""
    low, high = torch.aminmax(weights.buffer)
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return
    for target, pair in weights.pairs.items():
        for side, half in (("A", pair.a), ("B", pair.b)):
            if not torch.isfinite(half).all():
                raise AdapterError(
                    f"lora_{side} of {target} has NaN or infinite weights (as "
                    f"{str(half.dtype).removeprefix('torch.')}); training failed, or they need a "
                    "wider --dtype. Use another checkpoint of the adapter."
                )
