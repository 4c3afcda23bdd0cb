"""Copies between tiers, from intent to acknowledgement.

A transfer holds both of its ends until it is acknowledged (T01), even if its request ends before
(T08). Units that did not arrive are not published, and both ends become free (H11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from manyroots.cache.index import Index
from manyroots.cache.lease import Lease
from manyroots.cache.planes import ABSENT, NO_UNITS, Plane, Units
from manyroots.cache.tree import Node
from manyroots.ids import CopyId, Tier
from manyroots.step import Bools, Copy, CopyDone


class Spot(NamedTuple):
    """A page of the tree that can be found after splits: the node that had it, and its depth."""

    node: Node
    depth: int

    def find(self) -> Node | None:
        """The node that has it now; None if it has left the tree."""
        node = self.node
        while node.parent is not None and node.first > self.depth:
            node = node.parent
        return node if node.is_attached and node.first <= self.depth < node.end else None


@dataclass(eq=False, slots=True)
class Handover:
    """Copies that are acknowledged together, because their pages and states are usable only
    together (H07)."""

    copy_ids: list[CopyId] = field(default_factory=list)
    answers: dict[CopyId, CopyDone] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Move:
    """One copy in progress: units from a plane to another, or to storage."""

    spots: tuple[Spot, ...]
    source: Plane
    target: Plane | None
    """None: storage."""
    source_units: Units
    target_units: Units
    """Empty if storage is the target."""
    leases: list[Lease]
    """The leases that wait for it: the one that started it, and those that joined later (T09)."""
    handover: Handover | None
    path: Units
    """Units of the source's plane above the copied ones. Held, as in a lease, because a held unit
    must have only held units above it."""


class UnitTransfers:
    """All copies in progress between tiers."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._moves: dict[CopyId, Move] = {}
        self._ended: dict[CopyId, CopyDone] = {}
        """Copies that have ended, but are settled after others."""
        self._outbox: list[Copy] = []
        self._next_id = 1
        self.moving: set[tuple[int, int]] = set()
        """(plane, unit) of sources being copied, so that each copy is started once."""
        self.loading: dict[tuple[int, int], tuple[CopyId, int]] = {}
        """Those being copied to the device: the copy, and the unit that it fills."""
        self.num_failed_units = 0

    @property
    def num_under_way(self) -> int:
        return len(self._moves)

    def moves(self) -> Iterator[Move]:
        """For audits."""
        return iter(self._moves.values())

    def take_intents(self) -> tuple[Copy, ...]:
        """Copies to start with the step being planned."""
        intents, self._outbox = tuple(self._outbox), []
        return intents

    def next_id(self) -> CopyId:
        self._next_id += 1
        return CopyId(self._next_id - 1)

    def start(
        self,
        spots: tuple[Spot, ...],
        source: Plane,
        target: Plane | None,
        source_units: Units,
        target_units: Units,
        *,
        lease: Lease | None = None,
        handover: Handover | None = None,
        hashes: tuple[bytes, ...] = (),
        is_overlapped: bool = False,
    ) -> None:
        """Hold both ends and queue the intent. The target's units no longer belong to the caller.

        Nothing may be added to a hand-over once its first intents have been taken.
        """
        path = self._path(spots, source, source_units)
        leases = [] if lease is None else [lease]
        move = Move(spots, source, target, source_units, target_units, leases, handover, path)
        copy_id = self.next_id()
        if handover is not None:
            handover.copy_ids.append(copy_id)
        pool = self._index.pools[source.index]
        pool.hold(source_units)
        pool.hold(path)
        self.moving.update((source.index, unit) for unit in source_units.tolist())
        if lease is not None:
            lease.num_loads += 1
            ends = zip(source_units.tolist(), target_units.tolist(), strict=True)
            self.loading.update({(source.index, a): (copy_id, b) for a, b in ends})
        self._moves[copy_id] = move
        self._outbox.append(
            Copy(
                copy_id=copy_id,
                family=source.family_index,
                source=source.tier,
                target=Tier.STORAGE if move.target is None else move.target.tier,
                source_units=source_units.astype(np.int32),
                target_units=target_units.astype(np.int32),
                hashes=hashes,
                is_overlapped=is_overlapped,
            )
        )

    def join(self, copy_id: CopyId, lease: Lease) -> None:
        """Another lease waits for a copy in progress."""
        self._moves[copy_id].leases.append(lease)
        lease.num_loads += 1

    def acknowledge(self, done: CopyDone) -> list[tuple[Move, CopyDone]]:
        """A copy has ended. Returns the copies that are settled now, with their answers. None if it
        is unknown, or if others that are settled with it or before it are still in progress; both
        of its ends then stay held."""
        move = self._moves.get(done.copy_id)
        if move is None:
            return []
        handover = move.handover
        if handover is None:
            self._ended[done.copy_id] = done
            return self._settle_in_order()
        handover.answers[done.copy_id] = done
        if len(handover.answers) < len(handover.copy_ids):
            return []
        return [self._settle(handover.answers[copy_id]) for copy_id in handover.copy_ids]

    def waits_for(self, copy_id: CopyId) -> set[CopyId]:
        """Copies in progress that are settled with this one, or before it.

        On an ordered plane, a page is not findable before the pages above it. Until then its source
        stays held: otherwise the page could be lost on the host, with units that a lease holds. A
        lease that waits for the page waits for those above it, so it is not delayed.
        """
        move = self._moves[copy_id]
        if move.handover is not None:
            return set(move.handover.copy_ids)
        if move.target is None or not move.target.is_ordered:
            return set()
        return {
            other_id
            for other_id, other in self._moves.items()
            if other.target is move.target
            and other.spots[0].depth < move.spots[0].depth
            and any(lease in other.leases for lease in move.leases)
        }

    def _settle_in_order(self) -> list[tuple[Move, CopyDone]]:
        """Settle the copies that have ended and wait for no others, from the top of the tree."""
        from_top = sorted(self._ended, key=lambda copy_id: self._moves[copy_id].spots[0].depth)
        return [
            self._settle(self._ended.pop(copy_id))
            for copy_id in from_top
            if not self.waits_for(copy_id)
        ]

    def _settle(self, done: CopyDone) -> tuple[Move, CopyDone]:
        """Publish what arrived and release both ends."""
        move = self._moves.pop(done.copy_id)
        pools = self._index.pools
        if move.target is not None:
            if move.target.is_ordered:
                for lease in move.leases:
                    self._hold_path(move, move.target, lease)
            for node, first, at, end in _runs(move.spots, done.arrived):
                self._publish(move, node, first, at, end)
            pools[move.target.index].drop(move.target_units)
        units = move.source_units.tolist()
        pools[move.source.index].drop(move.source_units)
        pools[move.source.index].drop(move.path)
        self.moving.difference_update((move.source.index, unit) for unit in units)
        if move.leases:
            for unit in units:
                del self.loading[move.source.index, unit]
        num_failed = int(np.count_nonzero(~np.asarray(done.arrived)))
        self.num_failed_units += num_failed
        if num_failed and move.target is not None:
            self._distrust(move, done)
        for lease in move.leases:
            lease.num_loads -= 1
            lease.has_failed |= num_failed > 0
        return move, done

    def _path(self, spots: tuple[Spot, ...], source: Plane, source_units: Units) -> Units:
        if not source.is_ordered:
            return NO_UNITS
        deepest = max(spots, key=_depth)
        node = deepest.find()
        if node is None:
            return NO_UNITS
        above = self._index.units_above(node, deepest.depth, source.index)
        return above[~np.isin(above, source_units)]

    def _publish(self, move: Move, node: Node, first: int, at: int, end: int) -> None:
        """Publish units `at` to `end` of a copy, for a node's pages from `first` on."""
        plane = move.target
        assert plane is not None
        units = move.target_units[at:end]
        there = node.units[plane.index][first : first + len(units)]
        places = first + (there == ABSENT).nonzero()[0]
        if len(places) == 0:
            return
        if plane.is_ordered and not self._index.has_unit_above(node, int(places[0]), plane.index):
            return  # its copy failed, or it was evicted after the requests that held it had ended
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            self._index.add(node, plane.index, run, units[run - first])

    def _hold_path(self, move: Move, plane: Plane, lease: Lease) -> None:
        """Before a lease's units become findable, it holds what others have put above them or in
        their place: a held unit must have only held units above it."""
        if not lease.is_open:
            return
        table = lease.tables[plane.family_index]
        ends = zip(move.spots, move.target_units.tolist(), strict=True)
        own = [s for s, unit in ends if s.depth < len(table) and table[s.depth] == unit]
        own.sort(key=_depth, reverse=True)
        deepest = next((s for s in own if s.find() is not None), None)
        node = None if deepest is None else deepest.find()
        if deepest is None or node is None:
            return
        path = self._index.units_above(node, deepest.depth + 1, plane.index)
        held = [table, *(units for index, units in lease.duplicates if index == plane.index)]
        others = path[~np.isin(path, np.concatenate(held))]
        if len(others):
            self._index.pools[plane.index].hold(others)
            lease.duplicates += ((plane.index, others),)

    def _distrust(self, move: Move, done: CopyDone) -> None:
        """Units that could not be read from the host must not be found again."""
        source = move.source
        if source.tier is not Tier.HOST:
            return
        for spot, unit, ok in zip(move.spots, move.source_units, done.arrived, strict=True):
            node = spot.find()
            if ok or node is None:
                continue
            place = spot.depth - node.first
            if node.units[source.index][place] == unit:
                self._index.remove(node, source.index, np.array([place]))


def _runs(spots: Sequence[Spot], arrived: Bools) -> Iterator[tuple[Node, int, int, int]]:
    """Consecutive pages of one node that have arrived: the node, the position of the first, and the
    range of the copy's units. Pages that have left the tree are skipped."""
    at = 0
    while at < len(spots):
        spot = spots[at]
        node = spot.find() if arrived[at] else None
        end = at + 1
        if node is not None:
            while (
                end < len(spots)
                and arrived[end]
                and spots[end] == (spot.node, spot.depth + end - at)
                and spots[end].depth < node.end
            ):
                end += 1
            yield node, spot.depth - node.first, at, end
        at = end


def _depth(spot: Spot) -> int:
    return spot.depth
