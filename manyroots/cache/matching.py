"""Computes how far a prompt can be resumed, and from which tiers.

Read-only. The result is the longest boundary from which *every* family can resume (H02, C06).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manyroots.cache.planes import ABSENT, NO_UNITS, CacheLayout, Plane, Units
from manyroots.cache.tree import Node, Walk
from manyroots.step import Bools


class Limit(enum.Enum):
    """The reason that a match is not longer (S07)."""

    NOTHING = "everything but the last token was found"
    COLD = "the index knows no more of these tokens"
    NAMESPACE = "the index knows more of these tokens only as computed with other weights"
    WINDOW = "the pages of a window were evicted"
    CHECKPOINT = "no state was saved there"
    TIER = "loading the rest would take longer than computing it"
    STORAGE = "storage, which may have the rest, was left alone: it is too slow, or fails"
    OFF = "nothing is reused: caching is off, or the request wants its whole prompt computed"

    __hash__ = object.__hash__
    """Every request is counted by its limit; an enum's own hash is a slow Python function."""

    def __init__(self, meaning: str) -> None:
        self.label = self._name_.lower()
        """As callers read it, also for every request; an enum's own name is a slow property."""


class Match(NamedTuple):
    """The result of a lookup."""

    walk: Walk
    num_device_pages: int
    """The longest boundary that the device alone can resume from."""
    num_pages: int
    """The longest boundary with the host's help."""
    limit: Limit

    @property
    def num_worthwhile_pages(self) -> int:
        """The boundary that is fastest to resume from."""
        return self.num_device_pages if self.limit is Limit.TIER else self.num_pages


def judge(layout: CacheLayout, walk: Walk, walk_limit: Limit) -> Match:
    """Find the boundaries along a path, which ends because of `walk_limit`."""
    units = {plane.index: path_units(walk.nodes, walk.depth, plane) for plane in layout.planes}
    on_device = [units[plane.index] != ABSENT for plane in layout.device]
    present = on_device
    if layout.host:
        on_host = [units[plane.index] != ABSENT for plane in layout.host]
        present = [a | b for a, b in zip(on_device, on_host, strict=True)]
    num_pages, blocker = _longest(layout, present)
    num_device_pages, _ = _longest(layout, on_device)
    limit = walk_limit if num_pages == walk.depth else _reason(blocker)
    return Match(walk, num_device_pages, num_pages, limit)


def path_units(nodes: Sequence[Node], depth: int, plane: Plane) -> Units:
    """The units of a path's pages on one plane; read-only, because they may be the tree's own."""
    if not nodes:
        return NO_UNITS
    index = plane.index
    if len(nodes) == 1:
        return nodes[0].units[index][:depth]
    return np.concatenate([node.units[index] for node in nodes])[:depth]


def _longest(layout: CacheLayout, present: list[Bools]) -> tuple[int, Plane | None]:
    """The longest boundary, and the family that rules out longer ones."""
    good = np.ones(len(present[0]), np.bool_)
    blocker: Plane | None = None
    best = len(good)
    for plane, there in zip(layout.device, present, strict=True):
        good &= plane.family.resumable(there)
        places = good.nonzero()[0]
        longest = int(places[-1]) + 1 if len(places) else 0
        if longest < best:
            best, blocker = longest, plane
    return best, blocker


def _reason(blocker: Plane | None) -> Limit:
    if blocker is None or blocker.family.is_ordered:
        return Limit.COLD
    return Limit.CHECKPOINT if blocker.family.is_state else Limit.WINDOW
