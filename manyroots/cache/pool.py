"""The units of one plane: who holds each, which are free.

Counts only; the bytes are the execute half's. A unit is in exactly one of three states: free (on
the stack), cached (indexed by the tree, held by nobody) or held (by at least one lease or
transfer; indexed or not). `free + cached + held = total` always.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from manyroots.step import Int32s


class UnitPool:
    """A fixed number of units with a count of holders each.

    Units are int32 wherever they are kept, and made native integers before they index an array:
    numpy is several times as fast then.
    """

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.holders = np.zeros(num_units, np.int32)
        self.indexed = np.zeros(num_units, np.bool_)
        # A stack, lowest unit on top, so that two engines fed the same calls agree on every unit.
        self._stack = np.arange(num_units - 1, -1, -1)
        self.num_free = num_units
        self.num_cached = 0

    @property
    def num_available(self) -> int:
        """Units that could be allocated now."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        return self.num_units - self.num_free - self.num_cached

    def take(self, count: int) -> Int32s:
        """Hold `count` free units; the caller has made sure that there are as many."""
        end, self.num_free = self.num_free, self.num_free - count
        taken = self._stack[self.num_free : end][::-1]
        self.holders[taken] = 1
        return taken.astype(np.int32)

    def hold(self, units: Int32s) -> None:
        """One more holder for each; they are held or indexed already. No unit occurs twice."""
        at = units.astype(np.intp)
        held = self.holders[at]
        self.num_cached -= len(held) - int(np.count_nonzero(held))
        held += 1
        self.holders[at] = held

    def drop(self, units: Int32s) -> None:
        """One holder fewer; what nobody holds becomes cached if indexed, free if not."""
        at = units.astype(np.intp)
        left = self.holders[at]
        left -= 1
        self.holders[at] = left
        orphans = at[left == 0] if np.count_nonzero(left) else at
        indexed = self.indexed[orphans]
        num_indexed = int(np.count_nonzero(indexed))
        self.num_cached += num_indexed
        if num_indexed < len(orphans):
            self._put_back(orphans[~indexed])

    def index(self, units: Int32s) -> None:
        """The tree now leads to these held units."""
        self.indexed[units.astype(np.intp)] = True

    def unindex(self, units: Int32s) -> None:
        """The tree no longer leads to these; those that nobody holds become free."""
        at = units.astype(np.intp)
        self.indexed[at] = False
        orphans = at[self.holders[at] == 0]
        self.num_cached -= len(orphans)
        self._put_back(orphans)

    def free_units(self) -> npt.NDArray[np.intp]:
        """For audits."""
        return self._stack[: self.num_free].copy()

    def _put_back(self, units: npt.NDArray[np.intp]) -> None:
        # Reversed, so that the first unit of a sequence is the first to be taken again.
        begin, self.num_free = self.num_free, self.num_free + len(units)
        self._stack[begin : self.num_free] = units[::-1]
