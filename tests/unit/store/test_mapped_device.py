"""Blocks mapped to regions of addresses, with a driver that only keeps books."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch

from manyroots.store import mapped_device
from manyroots.store.mapped_device import BLOCK_BYTES, MappedDevice, can_map

BASE = 1 << 40


class Driver:
    """Refuses what a GPU's would: a place mapped twice, one unmapped that is empty."""

    def __init__(self) -> None:
        self.num_handles = 0
        self.places: dict[int, int] = {}
        """The block at each address."""
        self.open: set[int] = set()
        """Addresses that kernels may use."""

    def cuMemAddressReserve(self, base: Any, *_: Any) -> int:  # noqa: N802
        base._obj.value = BASE
        return 0

    def cuMemAddressFree(self, *_: Any) -> int:  # noqa: N802
        return int(bool(self.places))

    def cuMemCreate(self, handle: Any, *_: Any) -> int:  # noqa: N802
        self.num_handles += 1
        handle._obj.value = self.num_handles
        return 0

    def cuMemRelease(self, _: Any) -> int:  # noqa: N802
        self.num_handles -= 1
        return 0

    def cuMemMap(self, address: ctypes.c_uint64, *rest: Any) -> int:  # noqa: N802
        if address.value in self.places:
            return 1
        self.places[address.value] = rest[2].value
        return 0

    def cuMemUnmap(self, address: ctypes.c_uint64, _: Any) -> int:  # noqa: N802
        self.open.discard(address.value)
        return 0 if self.places.pop(address.value, None) else 1

    def cuMemSetAccess(self, address: ctypes.c_uint64, size: Any, *_: Any) -> int:  # noqa: N802
        asked = range(address.value, address.value + size.value, BLOCK_BYTES)
        self.open |= set(asked)
        return int(not set(asked) <= set(self.places))

    def cuPointerGetAttribute(self, _: Any, __: int, address: Any) -> int:  # noqa: N802
        return int(address.value not in self.open)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(mapped_device, "_driver", lambda: driver)
    monkeypatch.setattr(mapped_device, "_tensor", lambda *_: torch.zeros(1))
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    return driver


def blocks_of(driver: Driver, memory: MappedDevice, region: int) -> list[int]:
    """Those that kernels may use, from the region's beginning on; the last is the shared one."""
    start, found = BASE + memory.start(region), []
    while start + len(found) * BLOCK_BYTES in driver.open:
        found.append(driver.places[start + len(found) * BLOCK_BYTES])
        if len(found) > 1 and found[-1] == 1:
            break
    return found


def test_a01_regions_have_what_they_took_and_no_block_twice(driver: Driver) -> None:
    """A01: of random sizes, taken and given back; all is returned at the end."""
    rng, held = random.Random("regions"), dict[int, int]()
    memory = MappedDevice(8, 12 * BLOCK_BYTES - 5, 30, torch.device("cpu", 0))
    for _ in range(500):
        region = rng.randrange(8)
        if held.pop(region, None) is not None:
            memory.give_back(region)
        count = rng.randint(1, 12)
        if sum(held.values()) + count <= 30:
            memory.take(region, count * BLOCK_BYTES - rng.randint(0, 9))
            held[region] = count
        assert memory.num_used == sum(held.values())
        own = {region: blocks_of(driver, memory, region) for region in held}
        assert {region: len(found) - 1 for region, found in own.items()} == held
        assert all(found[-1] == 1 for found in own.values()), "the shared block comes last"
        taken = [block for found in own.values() for block in found[:-1]]
        assert len(set(taken)) == len(taken), "a block is in two places"
        assert BASE in driver.open, "Triton asks about the first address"
    memory.close()
    memory.close()
    assert (driver.num_handles, driver.places) == (0, {})


def test_a01_the_same_size_again_maps_nothing(driver: Driver) -> None:
    memory = MappedDevice(2, 4 * BLOCK_BYTES, 4, torch.device("cpu", 0))
    memory.take(0, 3 * BLOCK_BYTES)
    before = dict(driver.places)
    memory.give_back(0)
    memory.take(0, 3 * BLOCK_BYTES - 1)
    assert driver.places == before


def test_more_than_there_is_is_refused(driver: Driver) -> None:
    memory = MappedDevice(2, 4 * BLOCK_BYTES, 4, torch.device("cpu", 0))
    memory.take(0, 3 * BLOCK_BYTES)
    with pytest.raises(RuntimeError, match="2 blocks are wanted, and 1 are free"):
        memory.take(1, 2 * BLOCK_BYTES)


def test_a_cpu_maps_nothing() -> None:
    assert not can_map(torch.device("cpu"))
