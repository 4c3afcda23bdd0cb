"""GPU memory by address: reserves a large address range and maps blocks where they are needed.

Takes the size of a region, the number of regions, and the number of blocks that they share; gives a
flat tensor over all regions. Only blocks are memory: a region without blocks takes nothing, and a
region's blocks are at its start. Any free block can be used, so there is no fragmentation.

A region keeps its blocks until others need them, so adapters of the same size in turn map nothing.
The caller that takes or gives back ensures that no kernel uses the region.

Each region's blocks are followed by one shared block, so that a masked load may still name an
address there. The first address also has that block: Triton asks the driver about it at every
launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2 << 20
"""The unit in which GPUs map memory."""

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_DEVICE_POINTER = 3
_IS_SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: memory of one device that no other process shares."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def can_map(device: torch.device) -> bool:
    """Whether this device's memory can be mapped this way; tested once."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    try:
        found = ctypes.c_int()
        code = _driver().cuDeviceGetAttribute(
            ctypes.byref(found), _IS_SUPPORTED, device.index or torch.cuda.current_device()
        )
        if code or found.value != 1:
            return False
        probe = MappedDevice(1, BLOCK_BYTES, 1, device)
    except (OSError, AttributeError, RuntimeError, MemoryError):
        logger.warning("device memory can't be mapped; adapters have slots", exc_info=True)
        return False
    probe.close()
    return True


class MappedDevice:
    """Address regions, and blocks of memory for some of them."""

    def __init__(
        self, num_regions: int, region_bytes: int, num_blocks: int, device: torch.device
    ) -> None:
        """Raises MemoryError if the device has too few free blocks."""
        torch.zeros(1, device=device)  # creates the context that the driver needs
        index = torch.cuda.current_device() if device.index is None else device.index
        self._location = _Location(_ON_DEVICE, index)
        self._per_region = -(-region_bytes // BLOCK_BYTES) + 1  # plus the shared one
        self.region_bytes = self._per_region * BLOCK_BYTES
        self._lock = threading.Lock()
        self._mapped: dict[int, list[ctypes.c_uint64]] = {}
        """By region: its blocks, from its start on."""
        self._unused: dict[int, None] = {}
        """Regions whose blocks others may take; longest unused first."""
        self._handles: list[ctypes.c_uint64] = []
        base = ctypes.c_uint64()
        size = BLOCK_BYTES + num_regions * self.region_bytes
        _check(
            "cuMemAddressReserve",
            _driver().cuMemAddressReserve(
                ctypes.byref(base), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0),
                ctypes.c_ulonglong(0),
            ),
        )  # fmt: skip
        self._base, self._num_bytes = base.value, size
        self._shared = self._create()
        self._put(self._base, self._shared)
        self._open(self._base, 1)
        self.free = [self._create() for _ in range(num_blocks)]
        self.data = _tensor(self._base, size, torch.device("cuda", index))
        _check("cuPointerGetAttribute", _ask_about(self._base))

    def start(self, region: int) -> int:
        """The start of a region, in bytes from the first address on."""
        return BLOCK_BYTES + region * self.region_bytes

    def take(self, region: int, num_bytes: int) -> None:
        """Give a region this much memory, from its start on."""
        count = -(-num_bytes // BLOCK_BYTES)
        with self._lock:
            self._unused.pop(region, None)
            mapped = self._mapped.get(region, [])
            while len(self.free) < count - len(mapped) and self._unused:
                self._resize(next(iter(self._unused)), 0)
            if len(self.free) < count - len(mapped):
                raise RuntimeError(f"{count} blocks are wanted, and {len(self.free)} are free")
            self._resize(region, count)

    def give_back(self, region: int) -> None:
        """Nothing uses a region's memory any more."""
        with self._lock:
            if region in self._mapped:
                self._unused[region] = None

    @property
    def num_used(self) -> int:
        """Blocks of regions that were not given back."""
        with self._lock:
            return sum(len(b) for r, b in self._mapped.items() if r not in self._unused)

    def close(self) -> None:
        """Return all memory and addresses to the driver; `data` must not be used again."""
        with self._lock:
            if not self._handles:
                return
            torch.cuda.synchronize(self._location.id)
            for region in list(self._mapped):
                self._resize(region, 0)
            self._take_away(self._base)
            for handle in self._handles:
                _check("cuMemRelease", _driver().cuMemRelease(handle))
            self._handles, self.free = [], []
            size = ctypes.c_size_t(self._num_bytes)
            _check(
                "cuMemAddressFree",
                _driver().cuMemAddressFree(ctypes.c_uint64(self._base), size),
            )

    def __del__(self) -> None:
        # Torch frees its own memory when nothing refers to it; so does this. Not at process exit,
        # when the driver may be gone.
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.close()

    def _create(self) -> ctypes.c_uint64:
        wanted = _Properties(type=_PINNED, location=self._location)
        handle = ctypes.c_uint64()
        code = _driver().cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(BLOCK_BYTES), ctypes.byref(wanted),
            ctypes.c_ulonglong(0),
        )  # fmt: skip
        if code:
            raise MemoryError(f"the GPU has no block of {BLOCK_BYTES} bytes left (CUDA {code})")
        self._handles.append(handle)
        return handle

    def _resize(self, region: int, count: int) -> None:
        """Map or unmap a region's last blocks until it has `count`, and the shared one after
        them."""
        mapped = self._mapped.setdefault(region, [])
        if count == len(mapped):
            return
        start = self._base + self.start(region)
        kept = min(count, len(mapped))
        if mapped:
            for at in range(kept, len(mapped) + 1):
                self._take_away(start + at * BLOCK_BYTES)
            self.free += reversed(mapped[kept:])
            del mapped[kept:]
        if not count:
            self._unused.pop(region, None)
            del self._mapped[region]
            return
        while len(mapped) < count:
            block = self.free.pop()
            self._put(start + len(mapped) * BLOCK_BYTES, block)
            mapped.append(block)
        self._put(start + count * BLOCK_BYTES, self._shared)
        self._open(start + kept * BLOCK_BYTES, count + 1 - kept)

    def _open(self, address: int, count: int) -> None:
        """Let kernels and copies use newly mapped blocks."""
        access = _Access(self._location, _READ_WRITE)
        code = _driver().cuMemSetAccess(
            ctypes.c_uint64(address), ctypes.c_size_t(count * BLOCK_BYTES),
            ctypes.byref(access), ctypes.c_size_t(1),
        )  # fmt: skip
        _check("cuMemSetAccess", code)

    def _put(self, address: int, block: ctypes.c_uint64) -> None:
        code = _driver().cuMemMap(
            ctypes.c_uint64(address), ctypes.c_size_t(BLOCK_BYTES), ctypes.c_size_t(0), block,
            ctypes.c_ulonglong(0),
        )  # fmt: skip
        _check("cuMemMap", code)

    def _take_away(self, address: int) -> None:
        code = _driver().cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(BLOCK_BYTES))
        _check("cuMemUnmap", code)


def _tensor(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Addresses as a tensor of bytes; only mapped parts may be accessed."""
    make = torch._C._construct_storage_from_data_pointer
    storage = make(address, device, num_bytes)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(storage, 0, (num_bytes,), (1,))


def _ask_about(address: int) -> int:
    """The driver's answer to Triton's query about a pointer; 0 if it may be used."""
    found = ctypes.c_uint64()
    code: int = _driver().cuPointerGetAttribute(
        ctypes.byref(found), _DEVICE_POINTER, ctypes.c_uint64(address)
    )
    return code


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")
