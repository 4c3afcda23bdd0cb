"""Extends leases: allocates the units that a step needs, and frees units that it no longer needs.

In: a lease, and the token range of a step. Out: units, or a refusal that changed nothing.
"""

from __future__ import annotations

import numpy as np

from manyroots.cache.checkpoints import next_stop
from manyroots.cache.eviction import Allocator
from manyroots.cache.index import Index
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Extension, Refusal
from manyroots.cache.planes import ABSENT, NO_UNITS, Plane, Units
from manyroots.cache.publishing import Publisher
from manyroots.cache.states import States
from manyroots.ids import StepId

MOST_DRAFTS = 1 << 20
"""More than any request wants."""


class Growth:
    """Gives leases units of every family, for one step at a time."""

    def __init__(
        self, index: Index, allocator: Allocator, states: States, publisher: Publisher
    ) -> None:
        self._index = index
        self._layout = index.layout
        self._page_size = index.layout.page_size
        self._allocator = allocator
        self._states = states
        self._publisher = publisher
        device = index.layout.device
        self._paged = [p for p in device if not p.family.is_state]
        self._unordered = [p for p in self._paged if not p.family.is_ordered]
        self._stateful = [p for p in device if p.family.is_state]

    def clip(self, lease: Lease, num_computed: int, num_tokens: int) -> int:
        """How many of `num_tokens` to compute so that the step ends where a state must be saved."""
        if not self._stateful:
            return num_tokens
        for plane in self._stateful:
            stop = next_stop(plane.family, lease, num_computed, self._page_size)
            if stop is not None:
                num_tokens = min(num_tokens, stop - num_computed)
        return num_tokens

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether a new lease fits, whatever it finds: each page found is one that it does not
        need. It holds a state that it resumes from beside its own."""
        num_pages, pools = self._pages_for(num_tokens), self._index.pools
        for plane in self._layout.device:
            if pools[plane.index].num_available < (2 if plane.family.is_state else num_pages):
                return False
        return True

    def can_reach(
        self, lease: Lease, num_computed: int, num_tokens: int, num_step_tokens: int
    ) -> bool:
        """Whether there is room to continue to `num_tokens`, in steps of at most `num_step_tokens`,
        if no other lease takes any. Units that each step frees count (H04): a family with a window
        needs the units of one step at a time."""
        needs = self._needs(lease, num_tokens)
        for family, _, _ in lease.onboarding:  # its table has a gap for each
            needs[family] += 1
        for plane in self._unordered:
            most = plane.family.most_needed(num_step_tokens)
            if most is not None:
                held = self._held_alone(lease, plane, len(lease.tables[plane.index]))
                if most - held <= self._index.pools[plane.index].num_available:
                    needs[plane.index] = 0  # each step fits after the previous one
        return self._has_room(lease, num_computed, needs)

    def extend(
        self,
        lease: Lease,
        num_computed: int,
        num_tokens: int,
        step_id: StepId,
        most_tokens: int = 0,
    ) -> Extension | Refusal:
        """As `PrefixCache.extend`. Includes no page of the next token: a window may free units
        before it, and a state may have to be saved."""
        if lease.num_sure_tokens is not None:
            raise behind_drafts(lease)
        if self._stateful and num_tokens - num_computed != self.clip(
            lease, num_computed, num_tokens - num_computed
        ):
            raise ValueError(
                f"a step from token {num_computed} to {num_tokens} passes a point where a state "
                "must be saved; ask `clip` how far it may go"
            )
        needs = self._needs(lease, num_tokens)
        if not self._has_room(lease, num_computed, needs):
            return Refusal.NO_ROOM
        if self._unordered:
            self._drop_behind_window(lease, num_computed)
        first = tuple(map(len, lease.tables))
        for family, count in enumerate(needs):
            if count:
                self._grow(lease, family, count)
        if self._stateful:
            self._states.save(lease, num_tokens, step_id)
        lease.num_covered_tokens = self._covered(num_tokens)
        return first

    def draft(
        self,
        lease: Lease,
        num_computed: int,
        num_sure: int,
        num_tokens: int,
        step_id: StepId,
        num_leases: int,
    ) -> Extension | Refusal:
        """Like `extend`, but tokens from `num_sure` on are guesses that the step checks (P11).

        Call `accept` afterwards. A window keeps everything that it needs from `num_computed` on.
        Guesses never take the last pages, which rows with sure tokens may need. With states they
        end before the page does: a saved state must cover only sure tokens.
        """
        if self._stateful and (
            num_sure != num_computed + 1 or num_tokens - num_sure > self.most_drafts(num_sure)
        ):
            return Refusal.CANNOT_REWIND
        needs = self._needs(lease, num_tokens)
        for family, need in enumerate(needs):
            if need and need + num_leases > self._index.pools[family].num_available:
                return Refusal.NO_ROOM
        extension = self.extend(lease, num_computed, num_tokens, step_id)
        if not isinstance(extension, Refusal):
            lease.num_sure_tokens = num_sure
        return extension

    def most_drafts(self, num_sure: int) -> int:
        """How many guesses may follow this many sure tokens."""
        if not self._stateful:
            return MOST_DRAFTS
        return max(0, self._pages_for(num_sure) * self._page_size - 1 - num_sure)

    def rewind(self, lease: Lease, num_tokens: int) -> None:
        """Of what a step computed over guesses, only the first `num_tokens` are right: free the
        units after them."""
        lease.num_sure_tokens = None
        num_pages = self._pages_for(num_tokens)
        for plane in self._paged:
            units = lease.shrink(plane.index, num_pages)
            if len(units):
                self._index.pools[plane.index].drop(units)
        lease.num_covered_tokens = self._covered(num_tokens)

    def _covered(self, num_tokens: int) -> int:
        """The token count up to which a lease with units for this many tokens needs nothing
        more."""
        end_of_page = self._pages_for(num_tokens) * self._page_size
        # A state may have to be saved when the page is full.
        is_watched = self._stateful and num_tokens < end_of_page
        return end_of_page - 1 if is_watched else end_of_page

    def next_pages(self, leases: list[Lease]) -> list[Units] | None:
        """One more page for each lease, all of which are full: by family, the unit that each got.

        None if they must be extended one by one: there is not room for all, or a family does more
        at a page's end than take a unit.
        """
        count, pools = len(leases), self._index.pools
        if self._stateful:
            return None
        for plane in self._paged:
            if pools[plane.index].num_available < count:
                return None
        for plane in self._unordered:
            self._drop_behind_windows(leases, plane)
        taken = [self._allocator.allocate(plane.index, count) for plane in self._paged]
        for family, units in enumerate(taken):
            for lease, unit in zip(leases, units.tolist(), strict=True):
                lease.grow_by_one(family, unit)
        for lease in leases:
            lease.num_covered_tokens += self._page_size
        return taken

    def _needs(self, lease: Lease, num_tokens: int) -> list[int]:
        """By family: units that the lease lacks to reach `num_tokens`."""
        num_pages = self._pages_for(num_tokens)
        needs = [max(0, num_pages - len(table)) for table in lease.tables]
        for plane in self._stateful:
            needs[plane.index] = int(plane.index not in lease.states)
        return needs

    def _has_room(self, lease: Lease, num_computed: int, needs: list[int]) -> bool:
        for family, need in enumerate(needs):
            if need and need > self._index.pools[family].num_available:
                credit = self._credit(lease, self._layout.device[family], num_computed)
                if need > self._index.pools[family].num_available + credit:
                    return False
        return True

    def _grow(self, lease: Lease, family: int, count: int) -> None:
        is_state = bool(self._stateful) and self._layout.device[family].family.is_state
        if is_state:
            self._states.make_room(family)
        units = self._allocator.allocate(family, count)
        lease.grow(family, units)
        if is_state:
            self._states.start(lease, family, int(units[0]))

    def _credit(self, lease: Lease, plane: Plane, num_computed: int) -> int:
        """Units of one family that `extend` frees before it takes any."""
        if plane.family.is_state:
            return self._states.num_passed(plane.index)
        if plane.family.is_ordered:
            return 0
        return self._held_alone(lease, plane, plane.family.first_needed(num_computed))

    def _held_alone(self, lease: Lease, plane: Plane, end: int) -> int:
        """Units of one family, of pages before `end`, that only this lease holds."""
        table = lease.tables[plane.index]
        units = table[lease.first_live[plane.index] : min(end, len(table))]
        held_once = self._index.pools[plane.index].holders[units[units != ABSENT]] == 1
        return int(np.count_nonzero(held_once))

    def _drop_behind_window(self, lease: Lease, num_computed: int) -> None:
        for plane in self._unordered:
            units = self._take_behind_window(lease, plane, num_computed)
            if len(units):
                self._index.pools[plane.index].drop(units)
                self._publisher.offer_before(lease, plane)

    def _drop_behind_windows(self, leases: list[Lease], plane: Plane) -> None:
        """Like `_drop_behind_window`, for full leases, of one family."""
        pool = self._index.pools[plane.index]
        taken = [self._take_behind_window(each, plane, each.num_covered_tokens) for each in leases]
        units = np.concatenate(taken)
        if len(set(units.tolist())) == len(units):
            pool.drop(units)
        else:  # each holder of a shared page gives up its own hold
            for each in taken:
                pool.drop(each)
        for lease, each in zip(leases, taken, strict=True):
            if len(each):
                self._publisher.offer_before(lease, plane)

    def _take_behind_window(self, lease: Lease, plane: Plane, num_computed: int) -> Units:
        """Remove units from a lease's table that no token after `num_computed` reads."""
        table, live = lease.tables[plane.index], lease.first_live[plane.index]
        first = min(plane.family.first_needed(num_computed), len(table))
        if first <= live:
            return NO_UNITS
        behind: Units = table[live:first][table[live:first] != ABSENT]
        table[live:first] = ABSENT
        lease.first_live[plane.index] = first
        return behind

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)


def behind_drafts(lease: Lease) -> RuntimeError:
    return RuntimeError(
        f"a step computes drafts after token {lease.num_sure_tokens} of this lease; "
        "`accept` the right ones before it grows further"
    )
