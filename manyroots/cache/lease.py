"""What the cache hands out: a request's right to its units, given back exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyroots.cache.keys import ENDLESS, PrefixKey
from manyroots.cache.matching import Limit
from manyroots.cache.planes import NO_UNITS, Units
from manyroots.cache.tree import ChildKey, Node
from manyroots.ids import StepId
from manyroots.messages import Retention


@dataclass(slots=True)
class Checkpoint:
    """A saved state that is not findable yet."""

    family: int
    boundary: int
    """Pages that it stands behind."""
    unit: int
    step_id: StepId
    """The step that saves it."""


class Lease:
    """The units one request holds. Only the cache changes it."""

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
        "resumed",
        "retention",
        "serial",
        "shared",
        "states",
        "tables",
    )

    def __init__(self, key: PrefixKey, cursor: Node, num_families: int, serial: int) -> None:
        """What is only annotated here is set by whoever makes the lease."""
        self.key = key
        self.serial = serial
        """Order of creation."""
        self.cursor = cursor
        """Deepest node of the tree on this request's path, as of its last publication."""
        self.tables: list[Units] = [NO_UNITS] * num_families
        """By family, the unit of each page; ABSENT where it is not held, yet or any more."""
        self._rooms: list[Units] = [NO_UNITS] * num_families
        """By family: what the table is the beginning of, so that it can grow where it is. Empty
        before it first grows: the table is what was found, and may be the tree's own."""
        self.first_live = [0] * num_families
        """By family, the first page whose unit is still held."""
        self.states: dict[int, int] = {}
        """By family that has one: the working state's unit."""
        self.resumed: dict[int, int] = {}
        """By family: the checkpoint to restore the working state from, held till then."""
        self.checkpoints: tuple[Checkpoint, ...] = ()
        """Saved by a launched step, or the newest two of the output, oldest first; held."""
        self.duplicates: tuple[tuple[int, Units], ...] = ()
        """By plane: units of others that the tree leads through in place of ours, because they
        computed the same tokens first. Held too: what is held must have only held ones above."""
        self.onboarding: tuple[tuple[int, int, int], ...] = ()
        """(family, page, host unit), held: found on the host, not yet on their way."""
        self.num_loads = 0
        """Copies to the device under way."""
        self.has_failed = False
        """A copy to the device did not arrive: what was found is not all there."""
        self.num_cached_tokens = 0
        """Tokens that were found, and need not be computed, when the lease was made."""
        self.limit: Limit
        """Why no more were found."""
        self.num_covered_tokens = 0
        """Up to here the lease needs nothing more: no units, and no state to be saved."""
        self.num_host_tokens = 0
        """How many of those had to come from the host."""
        self.num_sure_tokens: int | None = None
        """While a step computes drafts: how many tokens are right whatever becomes of those."""
        self.num_prompt_tokens: int
        self.junction: int
        """How far the index knew the tokens, in pages: where others part from this request."""
        self.shared = 0
        """Where requests that wait for this one part from it, in pages: they resume there."""
        self.num_allowed_pages = ENDLESS
        """How many pages, from the front, it may publish: none in a namespace that was evicted
        while it was open. Part of the lease, so that nothing outlasts it."""
        self.num_published_pages = 0
        """How many pages, from the front, have been offered to the tree."""
        self.num_saved_pages = 0
        """Behind how many pages of the prompt there is a state: one found, or one saved."""
        self.ahead: ChildKey | None
        """How the tree would know the page behind those that were found; None if there is none."""
        self.retention: Retention | None = None
        """What its request asks to be kept when it ends."""
        self.is_open = True

    def blame_storage(self) -> None:
        """What was found nowhere may lie in storage, which was too slow to be asked."""
        if self.limit is Limit.COLD:
            self.limit = Limit.STORAGE

    def grow(self, family: int, units: Units) -> None:
        """A table gets longer. What others were given of it stays as it is."""
        table, room = self.tables[family], self._rooms[family]
        first = len(table)
        end = first + len(units)
        if end > len(room):
            room = self._rooms[family] = np.empty(end + 8 + end // 8, np.intp)
            room[:first] = table
        room[first:end] = units
        self.tables[family] = room[:end]

    def shrink(self, family: int, num_pages: int) -> Units:
        """Cut a table to so many pages; gives the units after them."""
        table = self.tables[family]
        units: Units = table[num_pages:].copy()
        if len(units):
            self.tables[family] = table[:num_pages]
        return units

    def grow_by_one(self, family: int, unit: int) -> None:
        """As `grow`, for what happens most."""
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
