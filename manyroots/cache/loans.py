"""Device memory that the cache lends: units leave a pool for as long as something else uses them.

In: how many units to lend or to take back. Out: which were lent, and what the next one would cost.
Only what no request holds is lent, what is evicted next first. The units of one family move, the
first; the others keep theirs.
"""

from __future__ import annotations

import numpy as np

from manyroots.cache.costs import Costs
from manyroots.cache.eviction import Evictor
from manyroots.cache.index import Index
from manyroots.cache.planes import NO_UNITS, Units

FAMILY = 0


class Loans:
    """Units of the first family that are lent, and those that could be."""

    def __init__(self, index: Index, evictors: list[Evictor], costs: Costs) -> None:
        self._pool = index.pools[FAMILY]
        self._evictor = evictors[FAMILY]
        self._costs = costs
        self._page_size = index.layout.page_size
        self._has_host = bool(index.layout.host)
        self._new: list[Units] = []
        self.least_units = self._pool.num_units
        """The cache keeps so many; all of them, until it is told otherwise."""
        self.num_reserved = 0
        """So many units that no request holds are not lent: running requests find their next pages
        there, or they would be retracted."""
        self.is_short = False
        """Whether requests wait for units: none is lent then."""

    @property
    def num_idle_units(self) -> int:
        """Units that hold nothing."""
        return self._pool.num_free

    @property
    def num_kept_units(self) -> int:
        """Units that are not lent."""
        return self._pool.num_units

    @property
    def num_lent_units(self) -> int:
        return self._pool.num_lent

    @property
    def num_lendable_units(self) -> int:
        """Units that could be lent now."""
        if self.is_short:
            return 0
        pool = self._pool
        spare = pool.num_available - self.num_reserved
        return max(0, min(spare, pool.num_units - self.least_units))

    def lend(self, count: int) -> None:
        """The caller has made sure that so many are lendable."""
        if count > self._pool.num_free:
            self._evictor.evict(count - self._pool.num_free)
        self._new.append(self._pool.lend(count))

    def take_back(self, count: int) -> None:
        """So many of those that were lent can be allocated again."""
        self._pool.take_back(count)

    def take_new(self) -> Units:
        """Units that were lent since this was last asked, and have not come back."""
        new, self._new = self._new, []
        units = np.concatenate(new) if new else NO_UNITS
        return units[np.isin(units, self._pool.lent_units())] if len(units) else units

    @property
    def next_use(self) -> tuple[int, bool] | None:
        """When what would be evicted next was last used, by the cache's `num_uses`, and whether it
        is a shared prefix; None if that is nothing, or only what requests asked to keep."""
        return self._evictor.next_use

    def returns(self, is_fork: bool) -> tuple[int, int]:
        """Units that no request held, of shared prefixes or others: how many were found again, and
        how many evicted, so far."""
        pool = self._pool
        if is_fork:
            return pool.total_found_forks, pool.total_evicted_forks
        num_found = pool.total_found - pool.total_found_forks
        return num_found, pool.total_evicted - pool.total_evicted_forks

    @property
    def unit_s(self) -> float:
        """What it takes to have a page again that was evicted."""
        return self._costs.page_s(self._page_size, is_on_host=self._has_host)
