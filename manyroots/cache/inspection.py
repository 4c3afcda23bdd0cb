"""The prefix tree for the live page: bounded, read in slices, without changing anything.

Takes the index between two steps; gives rows of a table, without tokens. The longest runs of pages
come first, so the shortest exceed the limit; their parent counts them. Nodes may be added or
removed between two slices; removed ones are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from manyroots.cache.index import Index
from manyroots.cache.planes import ABSENT
from manyroots.cache.tree import Node
from manyroots.ids import Namespace
from manyroots.snapshot import MAX_NODES, NodeView, PlaneView

MAX_MARKS = 8
"""Runs of pages of one node and plane whose positions are listed."""


class TreeWalk:
    """One walk over the tree, longest runs first."""

    def __init__(
        self, index: Index, number: Callable[[Namespace], int], most_nodes: int = MAX_NODES
    ) -> None:
        """`number`: maps a namespace to a number."""
        self._number = number
        self._most = most_nodes
        self._sparse = [p.index for p in index.layout.planes if not p.family.is_ordered]
        """Planes that keep only some pages of a path: windows and states."""
        self._heap: list[tuple[int, int, Node]] = []
        self.nodes: list[NodeView] = []
        self._rest: dict[int, NodeView] = {}
        """By parent: nodes over the limit, counted together."""
        self._push_children(index.tree.root)

    def advance(self, count: int) -> bool:
        """Read this many more nodes; False once there are none."""
        heap = self._heap
        for _ in range(min(count, len(heap))):
            if not heap:
                break
            _, _, node = heapq.heappop(heap)
            if not node.is_attached:
                continue
            if len(self.nodes) < self._most:
                self.nodes.append(self._view(node))
                if node.children:
                    self._push_children(node)
            else:
                self._count(node)
        if not heap and self._rest:
            self.nodes.extend(self._rest.values())
            self._rest = {}
        return bool(heap)

    def _push_children(self, node: Node) -> None:
        for child in node.children.values():
            heapq.heappush(self._heap, (-child.num_pages, child.serial, child))

    def _view(self, node: Node) -> NodeView:
        assert node.parent is not None
        assert node.owner is not None
        return NodeView(
            node.serial,
            node.parent.serial,
            self._number(node.owner.namespace),
            node.num_pages,
            list(node.counts),
            node.last_used,
            node.num_hits,
            node.is_fork,
            1,
            self._marks(node) if self._sparse else [],
        )

    def _marks(self, node: Node) -> list[int]:
        marks: list[int] = []
        for plane in self._sparse:
            if 0 < node.counts[plane] < node.num_pages:
                is_there = np.concatenate(([False], node.units[plane] != ABSENT, [False]))
                edges = np.flatnonzero(is_there[1:] != is_there[:-1])[: 2 * MAX_MARKS].tolist()
                for first, end in zip(edges[::2], edges[1::2], strict=True):
                    marks += (plane, first, end)
        return marks

    def _count(self, node: Node) -> None:
        assert node.parent is not None
        assert node.owner is not None
        parent = node.parent.serial
        known = self._rest.get(parent)
        units = node.counts
        if known is not None:
            units = [a + b for a, b in zip(known.units, units, strict=True)]
        before = known or NodeView(
            -parent - 1, parent, self._number(node.owner.namespace), 0, [], 0, 0, False, 0, []
        )
        self._rest[parent] = before._replace(
            num_pages=max(before.num_pages, node.num_pages),
            units=list(units),
            last_used=max(before.last_used, node.last_used),
            hits=before.hits + node.num_hits,
            num_nodes=before.num_nodes + 1,
        )


def plane_views(index: Index) -> list[PlaneView]:
    """Every plane with its counts, which balance."""
    return [
        PlaneView(
            plane.family.name,
            "state" if plane.family.is_state else "full" if plane.family.is_ordered else "window",
            plane.tier.value,
            pool.num_units,
            pool.num_free,
            pool.num_cached,
            pool.num_held,
        )
        for plane, pool in zip(index.layout.planes, index.pools, strict=True)
    ]
