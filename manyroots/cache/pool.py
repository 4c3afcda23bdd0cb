"""The units of one plane: their holders, and which are free.

Counts only; the execute half has the bytes. A unit is in exactly one of three states: free (on the
stack), cached (indexed by the tree, without holders) or held (by at least one lease or transfer;
indexed or not). `free + cached + held = total` always.

Free units may be lent: their memory serves something else, and they are not part of the total
until it comes back.
"""

from __future__ import annotations

import numpy as np

from manyroots.cache.planes import Units

# Arrays of the same dtype as counts and flags: numpy takes twice as long with a Python value.
_ONE = np.array(1, np.int32)
_YES, _NO = np.array(True), np.array(False)


class UnitPool:
    """Units with a count of holders each."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        """Those that are not lent."""
        self.holders = np.zeros(num_units, np.int32)
        self.indexed = np.zeros(num_units, np.bool_)
        # A stack: the last `num_free` of the first `num_units` entries, the top one first. The
        # lowest unit is on top, so that two engines with the same calls agree on every unit. Lent
        # units are below the stack.
        self._stack = np.arange(num_units)
        self.num_free = num_units
        self.num_cached = 0
        self.total_found = 0
        """Cached units that were held again, each as often as it was."""
        self.total_found_forks = 0
        """Of those, units of shared prefixes."""
        self.total_evicted = 0
        """Cached units that became free."""
        self.total_evicted_forks = 0

    @property
    def num_available(self) -> int:
        """Units that could be allocated now."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        return self.num_units - self.num_free - self.num_cached

    def take(self, count: int) -> Units:
        """Hold `count` free units; the caller has checked that there are as many."""
        return self.take_view(count).copy()

    def take_view(self, count: int) -> Units:
        """Like `take`, but the result is valid only until units become free again."""
        top = self.num_units - self.num_free
        self.num_free -= count
        taken = self._stack[top : top + count]
        self.holders[taken] = _ONE
        return taken

    def hold(self, units: Units, is_fork: bool = False) -> None:
        """Add one holder to each; they are held or indexed already. No unit occurs twice.
        `is_fork`: they are of a shared prefix."""
        held = self.holders[units]
        num_found = len(held) - int(np.count_nonzero(held))
        self.num_cached -= num_found
        self.total_found += num_found
        if is_fork:
            self.total_found_forks += num_found
        held += _ONE
        self.holders[units] = held

    def drop(self, units: Units) -> None:
        """Remove one holder; units without holders become cached if indexed, otherwise free."""
        left = self.holders[units]
        left -= _ONE
        self.holders[units] = left
        orphans = units[np.logical_not(left)]
        free = orphans[np.logical_not(self.indexed[orphans])]
        self.num_cached += len(orphans) - len(free)
        if len(free):
            self._put_back(free)

    def index(self, units: Units) -> None:
        """The tree now leads to these held units."""
        self.indexed[units] = _YES

    def unindex(self, units: Units) -> None:
        """The tree no longer leads to these; those without holders become free."""
        self.indexed[units] = _NO
        orphans = units[np.logical_not(self.holders[units])]
        self.num_cached -= len(orphans)
        self.total_evicted += len(orphans)
        self._put_back(orphans)

    @property
    def num_lent(self) -> int:
        return len(self.holders) - self.num_units

    def lend(self, count: int) -> Units:
        """Free units that leave the pool; the caller has made sure that there are as many. Those
        at the bottom of the stack go, which would be taken last."""
        self.num_units -= count
        self.num_free -= count
        return self._stack[self.num_units : self.num_units + count].copy()

    def take_back(self, count: int) -> None:
        """So many of the lent units are free again, the one lent last first."""
        self.num_units += count
        self.num_free += count

    def free_units(self) -> Units:
        """For audits."""
        return self._stack[self.num_units - self.num_free : self.num_units].copy()

    def lent_units(self) -> Units:
        """For audits."""
        return self._stack[self.num_units :].copy()

    def _put_back(self, units: Units) -> None:
        # In this order, so that the first unit of a sequence is the first to be taken again.
        top = self.num_units - self.num_free
        self.num_free += len(units)
        self._stack[top - len(units) : top] = units
