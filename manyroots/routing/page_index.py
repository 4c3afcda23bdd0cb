"""Which replicas have which pages, on which tier.

Takes page hashes as replicas store and remove them; gives, for the hashes of a prompt, how many
leading pages each replica has. A set of replicas is the bits of an int, so one lookup answers for
all of them.

A replica that has a page of full attention on the device has all pages before it (cache/README.md).
So the set can only shrink along a prompt, and a search by halves finds every change. On lower tiers
a page before it may be missing: there the count is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from manyroots.ids import Tier


class PageIndex:
    """Pages of all replicas by tier."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._holders: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        """Page hash -> the replicas that have it."""

    def __len__(self) -> int:
        """Distinct pages on the device tier."""
        return len(self._holders[Tier.DEVICE])

    def is_empty(self, tier: Tier) -> bool:
        return not self._holders[tier]

    def store(self, replica: int, tier: Tier, hashes: Sequence[int]) -> None:
        holders, bit = self._holders[tier], 1 << replica
        before, after = 0, bit
        for page in hashes:
            had = holders.get(page, 0)
            if had != before:
                before, after = had, had | bit
            holders[page] = after  # pages in a row share one int: a lookup touches less memory

    def remove(self, replica: int, tier: Tier, hashes: Sequence[int]) -> None:
        holders, rest = self._holders[tier], ~(1 << replica)
        before, left = 0, 0
        for page in hashes:
            had = holders.get(page, 0)
            if had != before:
                before, left = had, had & rest
            if left:
                holders[page] = left
            else:
                holders.pop(page, None)

    def forget(self, replica: int) -> None:
        """A replica has nothing any more."""
        for tier in Tier:
            bit = 1 << replica
            self.remove(replica, tier, [p for p, has in self._holders[tier].items() if has & bit])

    def has(self, replica: int, tier: Tier, page: int) -> bool:
        return bool(self._holders[tier].get(page, 0) >> replica & 1)

    def leading(self, tier: Tier, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """How many of the prompt's first pages replicas have on this tier: (a set of replicas, a
        number of pages that all of them have). Numbers rise, and each set is within the one before
        it: a replica's number is that of the last set that has it."""
        holders = self._holders[tier]
        if not holders or not hashes:
            return []
        get, end = holders.get, len(hashes)
        found: list[tuple[int, int]] = []
        low, has = 0, get(hashes[0], 0)
        while has:
            # `low` is a page that all of them have; find the first that some of them lack.
            high = end
            while high - low > 1:
                middle = low + high >> 1
                if get(hashes[middle], 0) & has == has:
                    low = middle
                else:
                    high = middle
            left = get(hashes[high], 0) & has if high < end else 0
            found.append((has, high))
            low, has = high, left
        return found

    def num_leading(self, replica: int, tier: Tier, hashes: Sequence[int]) -> int:
        """How many of the prompt's first pages one replica has."""
        counts = (num for has, num in self.leading(tier, hashes) if has >> replica & 1)
        return max(counts, default=0)


@lru_cache(maxsize=16384)
def members(replicas: int) -> npt.NDArray[np.intp]:
    """The replicas of a set, as indices. Cached: the same sets come again, of adapters and system
    prompts."""
    packed = np.frombuffer(replicas.to_bytes(replicas.bit_length() + 7 >> 3, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little").nonzero()[0]
