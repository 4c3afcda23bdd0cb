"""Many copies between a GPU and page-locked memory, handed to the driver in one call.

Takes two arenas' tensors, the source and target units, and the part of each unit to copy; queues
the copies on the current stream. One call queues all of them. A call for each would take several
microseconds of Python, longer than a small unit's copy, and would compete with the thread that
launches steps. Drivers before CUDA 12.8 lack this call and get one per copy.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.step import Int32s

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.uint64]
CopyRun = tuple[int, int, int]
"""First source, first target, number of consecutive units."""
_IN_STREAM_ORDER = 1
_BESIDE_COMPUTATION = 1
WHOLE_UNIT = slice(None)


class _Attributes(ctypes.Structure):
    """The driver's `CUmemcpyAttributes`; the location hints are left empty."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """Contiguous copies, by address."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses
    """In bytes."""


def runs(sources: Int32s, targets: Int32s) -> Iterator[CopyRun]:
    """Units that are consecutive at both ends are one copy."""
    firsts, counts = _runs(sources, targets)
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        yield int(sources[first]), int(targets[first]), count


def pieces(
    source: Tensor, target: Tensor, sources: Int32s, targets: Int32s, part: slice = WHOLE_UNIT
) -> Pieces:
    """The copies. `part`: the bytes of each unit to copy."""
    unit_bytes = source[0].numel() * source.itemsize
    begin, end, _ = part.indices(unit_bytes)
    firsts, counts = np.arange(len(sources)), np.ones(len(sources), np.int64)
    if (begin, end) == (0, unit_bytes):
        firsts, counts = _runs(sources, targets)
    return Pieces(
        (sources[firsts].astype(np.uint64) * unit_bytes + (source.data_ptr() + begin)),
        (targets[firsts].astype(np.uint64) * unit_bytes + (target.data_ptr() + begin)),
        counts.astype(np.uint64) * (end - begin),
    )


def copy_batch(
    source: Tensor, target: Tensor, sources: Int32s, targets: Int32s, part: slice = WHOLE_UNIT
) -> None:
    """Queue the copies of units on the current stream, which must not be the default one."""
    call = _batch_call()
    if call is not None and len(sources):
        stream = torch.cuda.current_stream(target.device if target.is_cuda else source.device)
        code = call(pieces(source, target, sources, targets, part), stream.cuda_stream)
        if code == 0:
            return
        _warn_of(code)
    _copy_one_by_one(source, target, sources, targets, part)


def _copy_one_by_one(
    source: Tensor, target: Tensor, sources: Int32s, targets: Int32s, part: slice
) -> None:
    from_rows, to_rows = (data.view(len(data), -1).view(torch.uint8) for data in (source, target))
    is_whole = part == WHOLE_UNIT
    units = runs(sources, targets) if is_whole else (
        (first, place, 1) for first, place in zip(sources.tolist(), targets.tolist(), strict=True)
    )  # fmt: skip
    for first, place, count in units:
        to_rows[place : place + count, part].copy_(
            from_rows[first : first + count, part], non_blocking=True
        )


def _runs(sources: Int32s, targets: Int32s) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The start of each run, and its length."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} units are to become {len(targets)}")
    if len(sources) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    breaks = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    firsts = np.concatenate(([0], breaks.nonzero()[0] + 1))
    return firsts, np.diff(np.append(firsts, len(sources)))


BatchCall = Callable[[Pieces, int], int]
"""Pieces and a stream's handle -> the driver's error code, 0 for none."""


@cache
def _batch_call() -> BatchCall | None:
    """The driver's call; None if it has none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    newer = getattr(library, "cuMemcpyBatchAsync_v2", None)  # since CUDA 13
    older = getattr(library, "cuMemcpyBatchAsync", None)
    if newer is None and older is None:
        return None
    return _caller(older if newer is None else newer, tells_where=newer is None)


def _caller(function: Any, *, tells_where: bool) -> BatchCall:
    """`tells_where`: it has a parameter for the index of the failed copy."""
    attributes = _Attributes(_IN_STREAM_ORDER, flags=_BESIDE_COMPUTATION)
    begins_at = ctypes.c_size_t(0)
    function.restype = ctypes.c_int

    def call(batch: Pieces, stream: int) -> int:
        failed_at = (ctypes.byref(ctypes.c_size_t(0)),) if tells_where else ()
        code: int = function(
            _pointer(batch.targets), _pointer(batch.sources), _pointer(batch.sizes),
            ctypes.c_size_t(len(batch.sizes)), ctypes.byref(attributes), ctypes.byref(begins_at),
            ctypes.c_size_t(1), *failed_at, ctypes.c_void_p(stream),
        )  # fmt: skip
        return code

    return call


def _pointer(values: Addresses) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


@cache
def _warn_of(code: int) -> None:
    """Once for each code."""
    logger.warning("the driver refuses copies in batches (error %d): one by one then", code)
