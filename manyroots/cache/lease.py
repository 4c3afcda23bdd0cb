"""A request's hold on its units, which is released exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyroots.cache.keys import ENDLESS, PrefixKey
from manyroots.cache.matching import Limit
from manyroots.cache.planes import ABSENT, NO_UNITS, Units
from manyroots.cache.tree import ChildKey, Node, PathHold
from manyroots.ids import StepId
from manyroots.messages import Retention

_SPARE = np.full(64, ABSENT, np.intp)
"""Room for further pages, at the end of a table."""


@dataclass(slots=True)
class Checkpoint:
    """A saved state that is not findable yet."""

    family: int
    boundary: int
    """The number of pages before it."""
    unit: int
    step_id: StepId
    """The step that saves it."""


class Lease:
    """The units that one request holds. Only the cache changes it."""

    __slots__ = (
        "_rooms",
        "ahead",
        "checkpoints",
        "cursor",
        "duplicates",
        "first_live",
        "has_failed",
        "is_open",
        "junction",
        "key",
        "limit",
        "num_allowed_pages",
        "num_cached_tokens",
        "num_covered_tokens",
        "num_host_tokens",
        "num_loads",
        "num_prompt_tokens",
        "num_published_pages",
        "num_saved_pages",
        "num_sure_tokens",
        "onboarding",
        "path_hold",
        "resumed",
        "retention",
        "serial",
        "shared",
        "states",
        "tables",
    )

    def __init__(self, key: PrefixKey, cursor: Node, num_families: int, serial: int) -> None:
        """The creator of the lease sets the attributes that are only annotated here."""
        self.key = key
        self.serial = serial
        """Order of creation."""
        self.cursor = cursor
        """Deepest node of the tree on this request's path at its last publication."""
        self.tables: list[Units] = [NO_UNITS] * num_families
        """By family, the unit of each page; ABSENT if it is not held yet or any more."""
        self._rooms: list[Units] = [NO_UNITS] * num_families
        """By family: the array that the table is the start of, so that it can grow in place. Empty
        before the first growth: the table is then what was found, and may be the tree's own."""
        self.first_live = [0] * num_families
        """By family, the first page whose unit is still held."""
        self.states: dict[int, int] = {}
        """By family that has one: the working state's unit."""
        self.resumed: dict[int, int] = {}
        """By family: the checkpoint to restore the working state from, held until then."""
        self.checkpoints: tuple[Checkpoint, ...] = ()
        """Saved by a launched step, or the newest two of the output, oldest first; held."""
        self.duplicates: tuple[tuple[int, Units], ...] = ()
        """By plane: other requests' units that are in the tree instead of ours, because they
        computed the same tokens first. Held as well: a held unit must have only held units above
        it."""
        self.onboarding: tuple[tuple[int, int, int], ...] = ()
        """(family, page, host unit), held: found on the host, copy not started."""
        self.num_loads = 0
        """Copies to the device in progress."""
        self.has_failed = False
        """A copy to the device failed: some of what was found is missing."""
        self.path_hold: PathHold | None = None
        """Its hold on the pages that it found, if it shares one with other leases; its table starts
        with these pages."""
        self.num_cached_tokens = 0
        """Tokens that were found when the lease was made, and are not computed."""
        self.limit: Limit
        """The reason that no more were found."""
        self.num_covered_tokens = 0
        """Up to this token the lease needs nothing more: no units, and no saved state."""
        self.num_host_tokens = 0
        """How many of those came from the host."""
        self.num_sure_tokens: int | None = None
        """While a step computes drafts: the number of tokens that are right in any case."""
        self.num_prompt_tokens: int
        self.junction: int
        """How many pages of the tokens the index knew: where other prompts diverge from this
        one."""
        self.shared = 0
        """Where requests that wait for this one diverge from it, in pages: they resume there."""
        self.num_allowed_pages = ENDLESS
        """How many first pages it may publish: none in a namespace that was evicted while the lease
        was open. Part of the lease, so that nothing outlives it."""
        self.num_published_pages = 0
        """How many first pages have been offered to the tree."""
        self.num_saved_pages = 0
        """The number of pages of the prompt before its last state, found or saved."""
        self.ahead: ChildKey | None
        """The tree's key of the page after those that were found; None if there is none."""
        self.retention: Retention | None = None
        """What its request asks to keep when it ends."""
        self.is_open = True

    def blame_storage(self) -> None:
        """Pages that were not found may be in storage, which was too slow to ask."""
        if self.limit is Limit.COLD:
            self.limit = Limit.STORAGE

    def grow(self, family: int, units: Units) -> None:
        """Extend a table. Views that others have of it stay valid."""
        table, room = self.tables[family], self._rooms[family]
        first = len(table)
        end = first + len(units)
        if end > len(room):
            room = self._rooms[family] = np.concatenate((table, units, _SPARE))
        else:
            room[first:end] = units
        self.tables[family] = room[:end]

    def shrink(self, family: int, num_pages: int) -> Units:
        """Cut a table to this many pages; returns the units after them."""
        table = self.tables[family]
        units: Units = table[num_pages:].copy()
        if len(units):
            self.tables[family] = table[:num_pages]
        return units

    def grow_by_one(self, family: int, unit: int) -> None:
        """Like `grow`, for the most frequent case."""
        first, room = len(self.tables[family]), self._rooms[family]
        if first >= len(room):
            self.grow(family, np.array([unit], np.intp))
        else:
            room[first] = unit
            self.tables[family] = room[: first + 1]

    @property
    def is_ready(self) -> bool:
        """Whether everything found is on the device."""
        return not self.onboarding and self.num_loads == 0
