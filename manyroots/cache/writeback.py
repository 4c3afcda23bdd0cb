"""Copies device units to the host, and host units to storage.

Chooses what to copy and when, by policy; `UnitTransfers` executes the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manyroots.cache.eviction import Evictor
from manyroots.cache.index import Index
from manyroots.cache.planes import ABSENT, NO_UNITS, Plane
from manyroots.cache.policies import CachePolicies, WriteBack
from manyroots.cache.publishing import Publisher
from manyroots.cache.retention import Marks
from manyroots.cache.storage_health import StorageHealth
from manyroots.cache.transfers import Handover, Move, Spot, UnitTransfers
from manyroots.cache.tree import Indices, Node
from manyroots.ids import Tier


class WriteBacker:
    """Copies units to the tiers below the device."""

    def __init__(
        self,
        index: Index,
        evictors: list[Evictor],
        transfers: UnitTransfers,
        publisher: Publisher,
        policies: CachePolicies,
        storage: StorageHealth,
        marks: Marks,
    ) -> None:
        self._index = index
        self._evictors = evictors
        self._transfers = transfers
        self._publisher = publisher
        self._policies = policies
        self._storage = storage
        self._marks = marks
        self._has_host = bool(index.layout.host)
        self._open: dict[int, Handover] = {}
        """By the serial of a lease: its open hand-over, until the intents are taken."""

    def published(self, serial: int, nodes: list[Node]) -> None:
        """These nodes' units, of the lease with this serial, are computed and findable."""
        if self._has_host and self._policies.write_back is WriteBack.THROUGH:
            self._hand_over(serial, nodes)

    def reused(self, serial: int, node: Node) -> None:
        """The request with this lease reuses the path down to this node."""
        if self._has_host and self._policies.write_back is WriteBack.REUSED:
            path = [node]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            self._hand_over(serial, path[-2::-1])  # without the root

    def sent(self) -> None:
        """Intents were taken: later copies belong to another hand-over."""
        self._open.clear()

    def _hand_over(self, serial: int, nodes: Sequence[Node]) -> None:
        handover = self._open.setdefault(serial, Handover())
        for node in nodes:
            self.write_back(node, handover)

    def keep_ahead(self) -> None:
        """With write-back on eviction: copy what would go next while there is still room."""
        if not self._has_host or self._policies.write_back is not WriteBack.EVICTION:
            return
        for plane in self._index.layout.device:
            pool = self._index.pools[plane.index]
            wanted = int(pool.num_units * self._policies.low_water) - pool.num_free
            for node in self._evictors[plane.index].next_nodes(wanted):
                self.write_back(node, Handover())

    def write_back(self, node: Node, handover: Handover) -> None:
        """Copy to the host what this node has only on the device."""
        if not node.is_attached:
            return
        for plane in self._index.layout.device:
            host = self._index.layout.host_of(plane)
            if node.counts[plane.index] == 0 or node.counts[host.index] == node.num_pages:
                continue
            units = node.units[plane.index]
            places = ((units != ABSENT) & (node.units[host.index] == ABSENT)).nonzero()[0]
            places = self._ready(plane, node, places)
            count = self._make_room(host, len(places))
            if count:
                self._move(node, places[:count], plane, host, handover)

    def arrived_on_host(self, move: Move) -> None:
        """Host units were published: pass them on to storage."""
        if move.target is None or move.target.tier is not Tier.HOST:
            return
        self._publisher.arrived(spot.node for spot in move.spots)
        if not self._policies.uses_storage or not self._storage.may_write:
            return
        kept = [
            (spot, unit, node)
            for spot, unit in zip(move.spots, move.target_units.tolist(), strict=True)
            if (node := spot.find()) is not None
            and node.units[move.target.index][spot.depth - node.first] == unit
        ]
        if kept:
            hashes = tuple(self._index.hash_of(node, s.depth - node.first) for s, _, node in kept)
            self._transfers.start(
                tuple(spot for spot, _, _ in kept),
                move.target,
                None,
                np.array([unit for _, unit, _ in kept], np.intp),
                NO_UNITS,
                hashes=hashes,
            )
            nodes = (node for _, _, node in kept)
            self._marks.written(zip(nodes, hashes, strict=True))

    def _ready(self, plane: Plane, node: Node, places: Indices) -> Indices:
        """The pages whose unit is filled and not being copied already."""
        index, moving = plane.index, self._transfers.moving
        units = node.units[index][places].tolist()
        is_ready = [
            (index, unit) not in moving and not self._publisher.is_promised(node, index, unit)
            for unit in units
        ]
        return places[np.array(is_ready, np.bool_)]

    def _make_room(self, host: Plane, wanted: int) -> int:
        pool = self._index.pools[host.index]
        count = min(wanted, pool.num_available)
        if count > pool.num_free:
            self._evictors[host.index].evict(count - pool.num_free)
        return count

    def _move(
        self, node: Node, places: Indices, plane: Plane, host: Plane, handover: Handover
    ) -> None:
        # Making room may have cut the node; copy what is left of it.
        units = node.units[plane.index][places]
        taken = self._index.pools[host.index].take(len(places))
        spots = tuple(Spot(node, node.first + int(place)) for place in places)
        self._transfers.start(spots, plane, host, units, taken, handover=handover)
