"""Planes: one family on one tier. A node keeps one array of units for each plane.

A frozen description of a cache's parts; all code of the cache loops over planes, never over names
of families or tiers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manyroots.cache.families.family import Family
from manyroots.errors import ConfigError
from manyroots.ids import Tier

ABSENT = -1
"""In an array of units: this page has none on this plane."""
Units = npt.NDArray[np.intp]
"""Numbers of units, as native integers: numpy indexes with these several times as fast as with
others. A plan has them as int32."""
NO_UNITS: Units = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True)
class Plane:
    """One family on one tier, and how many units fit there."""

    index: int
    family_index: int
    family: Family
    tier: Tier
    num_units: int

    @property
    def is_ordered(self) -> bool:
        """Whether units are evicted only from the ends of the tree's paths.

        True on the device for a family that reads everything before: loose units can then be
        evicted without stranding held ones. The host has no such order, because copies arrive in
        any order; losing a page in the middle of a path also loses everything after it.
        """
        return self.family.is_ordered and self.tier is Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many units of one family fit on each tier; 0 on the host means no host tier."""

    family: Family
    num_device_units: int
    num_host_units: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Every plane of a cache: the device's first, family by family, then the host's."""

    page_size: int
    device: tuple[Plane, ...]
    host: tuple[Plane, ...]

    @classmethod
    def of(cls, page_size: int, capacities: tuple[Capacity, ...]) -> CacheLayout:
        if page_size < 1:
            raise ConfigError(f"--block-size is {page_size}; it must be at least 1.")
        if not capacities:
            raise ConfigError("a cache needs at least one family of layers.")
        for capacity in capacities:
            if capacity.num_device_units < 1:
                raise ConfigError(
                    f"{capacity.num_device_units} device units for family "
                    f"{capacity.family.name!r}; raise --kv-cache-memory-bytes."
                )
        with_host = [capacity.num_host_units > 0 for capacity in capacities]
        if any(with_host) and not all(with_host):
            raise ConfigError(
                "a host tier needs room for every family of layers: a prefix is resumed from all "
                "of them or from none. Raise the host's memory."
            )
        device = tuple(
            Plane(i, i, capacity.family, Tier.DEVICE, capacity.num_device_units)
            for i, capacity in enumerate(capacities)
        )
        count = len(device)
        host = tuple(
            Plane(count + i, i, capacity.family, Tier.HOST, capacity.num_host_units)
            for i, capacity in enumerate(capacities)
            if any(with_host)
        )
        return cls(page_size, device, host)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.device + self.host

    def host_of(self, plane: Plane) -> Plane:
        return self.host[plane.family_index]

    @property
    def is_sole(self) -> bool:
        """Whether there is one family, which keeps every page, on the device only: by far the most
        common cache, and the fastest."""
        return len(self.planes) == 1 and self.device[0].family.is_ordered

    @property
    def spine(self) -> tuple[Plane, ...]:
        """Planes that a page needs: those of ordered families, or all if none is ordered."""
        ordered = tuple(plane for plane in self.planes if plane.family.is_ordered)
        return ordered or self.planes
