"""The tables of the pool: for every site of one kind, the offsets of each slot's weights.

Takes a model's sites and, at a load, an adapter's pairs and the function that stores them; gives
kernels a `PoolSite` for each. The kind defines the columns of a table (see `LinearSite`,
`EmbeddingSite` and `ExpertSite`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.lora_ops.sites import PoolSite
from manyroots.store.adapter_sites import LoraSite, SiteParts
from manyroots.store.adapter_weights import LoraPair

S = TypeVar("S", bound=PoolSite)

PlaceFunction = Callable[[S, list[LoraPair | None]], list[int]]
"""Stores an adapter's pairs for a site's parts; returns the site's row of the table."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """An adapter's rows in the tables of one kind: one for every site."""

    offsets: np.ndarray
    scalings: np.ndarray

    def moved(self, further: SlotRows, num_slots: int) -> SlotRows:
        """The same for a slot at a distance of `num_slots`, if `further` is the next slot."""
        return replace(self, offsets=self.offsets + num_slots * (further.offsets - self.offsets))


class SiteTables(Generic[S]):
    """All sites of one kind. Their tables are one piece of memory, so that a load is one write."""

    def __init__(
        self,
        make: type[S],
        names: Mapping[LoraSite, list[str]],
        parts: SiteParts,
        *,
        pool: Tensor,
        num_slots: int,
        max_rank: int,
        width: Callable[[int], int],
        is_transposed: bool,
    ) -> None:
        """`names`: of each site's parts. `width`: of a slot's row, by the number of parts."""
        self.names = names
        self._device = pool.device
        self._is_transposed = is_transposed
        counts = [len(of_site) for of_site in names.values()]
        widths = [width(count) for count in counts]
        self._offsets = torch.zeros(num_slots * sum(widths), dtype=torch.int64, device=pool.device)
        self._scalings = torch.zeros(num_slots * sum(counts), device=pool.device)
        self._offset_places = _Places(num_slots, widths)
        self._scaling_places = _Places(num_slots, counts)
        tables = _cut(self._offsets, num_slots, widths)
        scalings = _cut(self._scalings, num_slots, counts)
        self.sites: dict[LoraSite, S] = {
            site: make(
                pool=pool,
                table=tables[index],
                scalings=scalings[index],
                part_sizes=tuple(parts[name].target.out_features for name in of_site),
                max_rank=max_rank,
                is_transposed=is_transposed,
            )
            for index, (site, of_site) in enumerate(names.items())
        }

    def rows(self, pairs: Mapping[str, LoraPair], place: PlaceFunction[S]) -> SlotRows:
        """Store an adapter; returns its slot's row of every site."""
        rows, scalings = [], []
        for host, site in self.sites.items():
            found = [_scaled(pairs.get(name), host.factor) for name in self.names[host]]
            rows.append(place(site, found))
            scalings.append([self._scaling(pair) for pair in found])
        return SlotRows(
            np.array(list(chain.from_iterable(rows)), np.int64),
            np.array(list(chain.from_iterable(scalings)), np.float32),
        )

    def write(self, slot: int, rows: SlotRows) -> None:
        if not self.sites:
            return
        for target, places, values in (
            (self._offsets, self._offset_places, rows.offsets),
            (self._scalings, self._scaling_places, rows.scalings),
        ):
            at = torch.from_numpy(places.of(slot)).to(self._device)
            target.index_copy_(0, at, torch.from_numpy(values).to(self._device))

    def _scaling(self, pair: LoraPair | None) -> float:
        if pair is None:
            return 0.0
        return 1.0 if self._is_transposed else pair.scaling


class _Places:
    """Offsets of a slot's rows in the flat memory of all tables."""

    def __init__(self, num_slots: int, widths: list[int]) -> None:
        per_site = np.array(widths, np.int64)
        before = np.cumsum(per_site) - per_site
        within = np.arange(per_site.sum()) - np.repeat(before, per_site)
        self._first = np.repeat(before * num_slots, per_site) + within
        self._width = np.repeat(per_site, per_site)

    def of(self, slot: int) -> np.ndarray:
        places: np.ndarray = self._first + slot * self._width
        return places


def _cut(flat: Tensor, num_slots: int, widths: list[int]) -> list[Tensor]:
    pieces = torch.split(flat, [num_slots * width for width in widths])
    return [p.view(num_slots, width) for p, width in zip(pieces, widths, strict=True)]


def _scaled(pair: LoraPair | None, factor: float) -> LoraPair | None:
    if pair is None or factor == 1.0:
        return pair
    return replace(pair, scaling=pair.scaling * factor)
