"""Copies and adapter loads on virtual time: when each one ends, and how.

They run beside the steps. Copies wait for each other on their link (`links.py`), adapter loads for
each other; a step's result tells of those that have ended by its own end. What a fault source makes
of each is decided by its number, so that a run replays exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from manyroots.ids import CopyId, Tier
from manyroots.simulate.costs import CostModel
from manyroots.simulate.faults import SLOW_FACTOR, FaultSource, TransferFault
from manyroots.simulate.links import Link
from manyroots.step import AdapterLoaded, Copy, CopyDone, LoadAdapter, LoadId, Plan

LOST_AFTER_S = 1.0
"""A copy or load without any sign of life is given up after so long, and told of as failed: until
then neither end may be touched, and no request may wait for ever."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """When something under way ends, and whether it will have worked."""

    at_s: float
    is_good: bool
    seconds: float


_Id = TypeVar("_Id", CopyId, LoadId)


class TransferModel:
    """What is under way. The runner begins things; the executor asks which have ended."""

    def __init__(self, costs: CostModel, faults: FaultSource, *, page_size: int) -> None:
        self._costs = costs
        self._faults = faults
        self._unit_bytes = costs.kv_bytes_per_token * page_size
        self._links = {
            ends: Link(costs, lower)
            for upper, lower in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.STORAGE))
            for ends in ((upper, lower), (lower, upper))
        }
        self._copies: dict[CopyId, _Ending] = {}
        self._seconds: dict[CopyId, float] = {}
        """How long copies took that have ended and were not asked about."""
        self._loads: dict[LoadId, _Ending] = {}
        self._loader_free_at_s = 0.0
        self._now_s = 0.0
        self.num_bad_copies = 0
        """Failed or lost, so far."""
        self.num_bad_loads = 0
        self.num_copied_units: dict[tuple[Tier, Tier], int] = dict.fromkeys(self._links, 0)
        """By (source, target); those that failed included."""

    @property
    def next_end_s(self) -> float | None:
        """When the first of what is under way ends; None if nothing is."""
        endings = [*self._copies.values(), *self._loads.values()]
        return min((ending.at_s for ending in endings), default=None)

    def begin(self, plan: Plan, now_s: float) -> None:
        """Start what a step brings along."""
        for copy in plan.copies:
            if copy.source is not copy.target:
                self._begin_copy(plan, copy, now_s)
        for intent in plan.adapters:
            if isinstance(intent, LoadAdapter):
                self._begin_load(intent, now_s)

    def pass_to(self, now_s: float) -> None:
        """The step whose result is made next ends then."""
        self._now_s = now_s

    def ended_copies(self, copies: list[Copy]) -> list[tuple[Copy, bool]]:
        """Of those under way, which have ended, in that order, and whether they worked."""
        by_id = {copy.copy_id: copy for copy in copies}
        ended = _take_ended(self._copies, self._now_s)
        self._seconds.update((copy_id, ending.seconds) for copy_id, ending in ended)
        return [(by_id[copy_id], ending.is_good) for copy_id, ending in ended]

    def timed(self, done: CopyDone) -> CopyDone:
        """With how long it took, once it was on its way."""
        return replace(done, seconds=self._seconds.pop(done.copy_id))

    def ended_loads(self, loads: list[LoadAdapter]) -> list[AdapterLoaded]:
        return [
            AdapterLoaded(
                load_id,
                None if ending.is_good else "the load was made to fail",
                ending.seconds,
            )
            for load_id, ending in _take_ended(self._loads, self._now_s)
        ]

    def _begin_copy(self, plan: Plan, copy: Copy, now_s: float) -> None:
        ends = (copy.source, copy.target)
        num_units = len(copy.hashes) or len(copy.target_units)
        fault = self._faults.transfer(copy.copy_id)
        if Tier.STORAGE in ends and self._faults.storage_is_dead(plan.step_id):
            fault = TransferFault.FAILED
        slowed_by = SLOW_FACTOR if fault is TransferFault.SLOW else 1.0
        num_bytes = num_units * self._unit_bytes
        end_s = self._links[ends].send(now_s, num_bytes, slowed_by=slowed_by)
        own_s = slowed_by * self._links[ends].alone_s(num_bytes)
        self.num_copied_units[ends] += num_units
        self._copies[copy.copy_id] = _ending(end_s, fault, own_s)
        self.num_bad_copies += not self._copies[copy.copy_id].is_good

    def _begin_load(self, load: LoadAdapter, now_s: float) -> None:
        fault = self._faults.load(load.load_id)
        slowed_by = SLOW_FACTOR if fault is TransferFault.SLOW else 1.0
        begin_s = max(now_s, self._loader_free_at_s)
        own_s = slowed_by * self._costs.adapter_load_s(load.source)
        self._loader_free_at_s = begin_s + own_s
        self._loads[load.load_id] = _ending(self._loader_free_at_s, fault, own_s)
        self.num_bad_loads += not self._loads[load.load_id].is_good


def _ending(end_s: float, fault: TransferFault, seconds: float) -> _Ending:
    if fault is TransferFault.LOST:
        return _Ending(end_s + LOST_AFTER_S, is_good=False, seconds=seconds + LOST_AFTER_S)
    return _Ending(end_s, is_good=fault is not TransferFault.FAILED, seconds=seconds)


def _take_ended(under_way: dict[_Id, _Ending], now_s: float) -> list[tuple[_Id, _Ending]]:
    ended = [(number, ending) for number, ending in under_way.items() if ending.at_s <= now_s]
    ended.sort(key=lambda item: (item[1].at_s, item[0]))
    for number, _ in ended:
        del under_way[number]
    return ended
