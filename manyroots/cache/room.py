"""Units for whoever needs them: free ones, and what must be evicted for the rest."""

from __future__ import annotations

from manyroots.cache.eviction import Evictor
from manyroots.cache.index import Index
from manyroots.cache.planes import Units


class Room:
    """Allocates units of any plane."""

    def __init__(self, index: Index, evictors: list[Evictor]) -> None:
        self._pools = index.pools
        self._evictors = evictors
        self.has_allocated = False
        """Since whoever asks for it last said that it had not."""

    def allocate(self, plane: int, count: int) -> Units:
        """Hold so many units; the caller has made sure that they are available."""
        self.has_allocated = True
        pool = self._pools[plane]
        if count > pool.num_free:
            self._evictors[plane].evict(count - pool.num_free)
        return pool.take(count)
