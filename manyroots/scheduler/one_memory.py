"""One memory for pages and adapters: what is evicted next, of either.

In: what the cache could lend, the adapters, and what a page and a block take. Out: units that the
cache lends, in whose memory adapters have blocks, and takes back. Held pages, and adapters that
requests hold, never move. All else has one price:

    seconds to bring it back * share that comes back / (its bytes * how long it was not used)

What was not used for long is not likely to be used soon, in proportion: of two things of one age
the one that is quicker to bring back goes, and one that takes twice as long stays twice as long.
The share is that of pages, or adapters, that lay unused and were used again before they were
evicted: prompts that come once make pages young, not useful. Memory that is free has no price and
goes first.

Adapters take memory when one of them is wanted (`lend`), at the end of planning. Pages take it
once a step, before any of them is allocated (`balance`). Either keeps what it can't do without:
pages for a request of the full length, blocks for the largest adapter.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from manyroots.cache.cache import PrefixCache
from manyroots.ids import AdapterDigest, Tier
from manyroots.lora.residency import Residency
from manyroots.lora.slots import Slot

RESERVED_PART = 4
"""This part of a step's pages is not lent. Without it running requests were retracted for lack of
pages, with all of a step more adapters waited; first tokens came later with either."""
NUM_RECENT_ADAPTERS = 128
RECENT_POOL = 0.5
"""So many adapters, and this part of all pages, tell how many come back."""
LEAST_RETURNS = 0.1
"""What is never kept can't come back: a share below this would never be seen to rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSizes:
    """What moves between pages and adapters, and what stays."""

    unit_bytes: int
    """Of a page, as far as it moves."""
    num_lent_units: int
    """At start."""
    least_units: int
    """Pages keep so many."""
    num_step_units: int
    """A step allocates so many, or not many more."""


class ReturnRate:
    """How many of the things that lie unused come back before they are evicted, lately."""

    def __init__(self, window: float) -> None:
        """`window`: things that are remembered."""
        self._window = window
        self._counted = (0, 0)
        self._returned = self._lost = 0.0

    def share(self, total_returned: int, total_lost: int) -> float:
        """Between 0 and 1, by counts that only grow."""
        self._returned += total_returned - self._counted[0]
        self._lost += total_lost - self._counted[1]
        self._counted = total_returned, total_lost
        excess = (self._returned + self._lost) / self._window
        if excess > 1:
            self._returned /= excess
            self._lost /= excess
        return max(LEAST_RETURNS, (self._returned + 1) / (self._returned + self._lost + 2))


class OneMemory:
    """Lends units of the cache to adapters. Implements `Lender`."""

    def __init__(self, cache: PrefixCache, adapters: Residency, sizes: SharedSizes) -> None:
        blocks = adapters.limits.blocks
        assert blocks is not None, "adapters that are counted in slots share no memory"
        self._cache = cache
        self._loans = cache.loans
        self._adapters = adapters
        self._unit_bytes = sizes.unit_bytes
        self._num_step_units = sizes.num_step_units
        self._block_bytes = blocks.block_bytes
        self._loans.least_units = sizes.least_units
        self._loans.num_reserved = sizes.num_step_units // RESERVED_PART
        self._loans.lend(sizes.num_lent_units)
        num_units = self._loans.num_kept_units + self._loans.num_lent_units
        window = RECENT_POOL * num_units
        self._page_returns = {False: ReturnRate(window), True: ReturnRate(window)}
        """By whether pages are of shared prefixes."""
        self._adapter_returns = ReturnRate(NUM_RECENT_ADAPTERS)
        self.total_lent_units = 0
        """After the start."""
        self.total_returned_units = 0
        adapters.lender = self
        adapters.slots.clock = lambda: cache.num_uses
        self._resize()

    # Lender

    @property
    def num_lendable_blocks(self) -> int:
        num_units = self._loans.num_lent_units + self._loans.num_lendable_units
        return num_units * self._unit_bytes // self._block_bytes - self._num_blocks

    def lend(self, num_blocks: int) -> None:
        num_blocks = self._num_blocks + min(num_blocks, self.num_lendable_blocks)
        lacking = num_blocks * self._block_bytes - self._lent_bytes
        num_units = -(-lacking // self._unit_bytes)
        if num_units > 0:
            self._loans.lend(num_units)
            self.total_lent_units += num_units
            self._resize()

    def is_cheaper(self, idle: Slot) -> bool:
        loans = self._loans
        if not loans.num_lendable_units:
            return False
        if loans.num_idle_units:
            return True
        price = self._page_price
        return price is not None and price < self._adapter_price(idle)

    # Each step

    def balance(self, without_room: Collection[AdapterDigest | None]) -> None:
        """Before pages are allocated: adapters have what they can't do without, and pages what a
        step takes, if that costs less than evicting as many. `without_room`: adapters of which a
        request found no pages to begin with. Then nothing is lent, and adapters of others that do
        not run leave, even if requests wait for them: with more adapters on the device than pages
        for their requests, none of these would begin sooner."""
        least = self._adapters.most_blocks
        self._loans.is_short = False
        if self._num_blocks < least:
            self.lend(least - self._num_blocks)
        self._loans.is_short = bool(without_room)
        lacking = self._num_step_units // 2 - self._loans.num_idle_units
        if lacking <= 0 or not self._loans.num_lent_units:
            return

        def may_go(idle: Slot, is_held: bool) -> bool:
            if without_room:
                return idle.owner not in without_room
            return not is_held and self._is_dearer(idle)

        num_blocks = -(-lacking * self._unit_bytes // self._block_bytes)
        self._adapters.put_out_idle(may_go, num_blocks)
        slots = self._adapters.slots
        num_used = max(slots.num_blocks - slots.num_free_blocks, least)
        spare_bytes = self._lent_bytes - num_used * self._block_bytes
        num_units = min(lacking, spare_bytes // self._unit_bytes)
        if num_units > 0:
            self._loans.take_back(num_units)
            self.total_returned_units += num_units
            self._resize()

    def take_lent(self) -> tuple[int, ...]:
        """Units that were lent since this was last asked: nothing of them is read again, and their
        memory can be given up."""
        return tuple(self._loans.take_new().tolist())

    def audit(self) -> None:
        """Raises AssertionError where memory is lost or used twice."""
        used = self._num_blocks * self._block_bytes
        assert used <= self._lent_bytes, "adapters have memory of pages"
        assert self._lent_bytes - used < self._block_bytes, "memory is lost between the two"
        assert self._loans.num_kept_units >= self._loans.least_units, "pages lack memory"

    # Inside

    @property
    def _num_blocks(self) -> int:
        return self._adapters.slots.num_blocks

    @property
    def _lent_bytes(self) -> int:
        return self._loans.num_lent_units * self._unit_bytes

    def _resize(self) -> None:
        self._adapters.slots.resize(self._lent_bytes // self._block_bytes)

    def _is_dearer(self, idle: Slot) -> bool:
        """Whether the page that goes next is worth more than an idle adapter."""
        price = self._page_price
        return price is None or price > self._adapter_price(idle)

    @property
    def _page_price(self) -> float | None:
        """Of the page that would be evicted next; None if there is none."""
        found = self._loans.next_use
        if found is None:
            return None
        last_used, is_fork = found
        returns = self._page_returns[is_fork].share(*self._loans.returns(is_fork))
        return returns * self._loans.unit_s / self._unit_bytes / self._age(last_used)

    def _adapter_price(self, idle: Slot) -> float:
        """An adapter on the device has a copy on the host, from where it comes back. Before a load
        was measured, its bytes are worth as much as a page's."""
        per_byte = self._adapters.transfers.load_seconds[Tier.HOST].per_byte
        if per_byte is None:
            per_byte = self._loans.unit_s / self._unit_bytes
        adapters = self._adapters
        returns = self._adapter_returns.share(
            adapters.slots.total_reused, adapters.total_device_evictions
        )
        return returns * per_byte / self._age(idle.idle_since)

    def _age(self, last_used: int) -> int:
        return max(1, self._cache.num_uses - last_used)
