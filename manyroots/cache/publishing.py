"""Makes a request's pages findable, and withdraws what a failed step announced.

In: a lease, its tokens and the number that is computed. The tree is extended along the lease's
path. If another request's copy of a page is already there, it stays, and the lease holds it, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from manyroots.cache.eviction import Evictor
from manyroots.cache.fork_share import ForkShare, name_of
from manyroots.cache.index import Index
from manyroots.cache.lease import Checkpoint, Lease
from manyroots.cache.next_turns import NEAR
from manyroots.cache.planes import ABSENT, Plane, Units
from manyroots.cache.tree import TOKEN_BYTES, Node
from manyroots.ids import StepId
from manyroots.step import Int32s


class Publisher:
    """Writes to the index on behalf of leases."""

    def __init__(
        self, index: Index, evictors: list[Evictor], forks: ForkShare | None, *, reuse: bool
    ) -> None:
        self._index = index
        self._evictors = evictors
        self._forks = forks
        self._page_size = index.layout.page_size
        self._page_bytes = self._page_size * TOKEN_BYTES
        self._paged = [p for p in index.layout.device if not p.family.is_state]
        self._prompt = [p for p in self._paged if p.family.shares_within_step]
        # Published together or not at all; other families publish at the commit.
        self._announces = reuse and len(self._prompt) == len(self._paged)
        self._pending: defaultdict[StepId, list[tuple[int, list[Node]]]] = defaultdict(list)
        """By step: nodes that were announced, each list with the serial of its lease."""
        self._filled: dict[StepId, dict[tuple[int, int], tuple[Node, int]]] = {}
        """By (plane, unit): node and depth of what a running step fills in older nodes."""
        self._saved: list[tuple[Lease, Checkpoint]] = []
        """States that the step being planned saves."""
        self.committed_step = StepId(0)
        """The newest step that succeeded."""
        self._tick = 0
        self._paged_planes = [plane.index for plane in self._paged]
        self._has_spine = any(plane.is_ordered for plane in self._paged)
        self._reach = max(plane.family.reach or 0 for plane in index.layout.device)
        near = (p.index for p in index.layout.planes if p.family.reach is not None)
        self._near = [evictors[plane] for plane in near]
        """Evictors of families that keep pages near resume points."""

    @property
    def num_uses(self) -> int:
        """Uses of the cache so far."""
        return self._tick

    def asked_again(self, lease: Lease) -> None:
        """A prompt was found as far as possible, so nothing of it will be new. The first time this
        may be the next turn of a conversation with less than a page; the second time it is a shared
        prompt."""
        node = nearest_attached(lease.cursor)
        if node.is_repeated:
            node.is_fork = True
        node.is_repeated = True

    def touch(self, node: Node, end: int) -> None:
        """The path down to `node` was used now, by a request that continues, or ends, at `end`."""
        tick = self._tick = self._tick + 1
        first = end - self._reach
        while node.parent is not None:
            node.last_used = tick
            if first < node.end <= end:
                node.last_resumed = tick
            node = node.parent

    def resumed(self, lease: Lease, boundary: int) -> None:
        """A state was restored. This does not count as use of earlier states on the path (H12)."""
        node = self._node_at(lease.cursor, boundary - 1)
        if node is not None:
            node.last_resumed = self._tick = self._tick + 1

    def arrived(self, nodes: Iterable[Node]) -> None:
        """Copies to the host have ended in these nodes, now."""
        tick = self._tick = self._tick + 1
        for node in nodes:
            current: Node | None = nearest_attached(node)
            # On the host, the path to a page is worth as much as the page.
            while current is not None and current.last_arrived != tick:
                current.last_arrived = tick
                current = current.parent

    def announce(self, lease: Lease, tokens: Int32s, num_tokens: int, step_id: StepId) -> None:
        """Step `step_id`, being planned, will have computed the first `num_tokens` of `tokens`.
        Publish the pages that are full then, for families that share within a step."""
        if not self._announces:
            return
        if lease.num_sure_tokens is not None:
            num_tokens = min(num_tokens, lease.num_sure_tokens)  # guesses must not be findable
        if num_tokens > len(tokens):
            num_tokens = len(tokens)
        num_pages = num_tokens // self._page_size
        if num_pages > lease.num_published_pages:
            nodes = self.publish(lease, tokens, num_pages, step_id, False)
            if nodes:
                self._pending[step_id].append((lease.serial, nodes))
        for saved in lease.checkpoints:
            if saved.step_id == step_id:
                self._saved.append((lease, saved))

    def announce_checkpoints(self) -> None:
        """A step is planned: the next one may restore the prompt states that it saves. The step
        itself cannot, since it restores before the model runs and saves after it."""
        for lease, saved in self._saved:
            if saved in lease.checkpoints:
                self._announce_checkpoint(lease, saved)
        self._saved.clear()

    def _announce_checkpoint(self, lease: Lease, saved: Checkpoint) -> None:
        """The lease holds a state until its step is done, so that nothing else is written to its
        unit before."""
        boundary = saved.boundary
        if boundary * self._page_size > lease.num_prompt_tokens:
            return
        if boundary > min(lease.num_allowed_pages, lease.num_published_pages):
            return
        node = self._node_at(lease.cursor, boundary - 1)
        if node is None or node.units[saved.family][boundary - 1 - node.first] != ABSENT:
            return
        place = np.array([boundary - 1 - node.first])
        self._index.add(node, saved.family, place, np.array([saved.unit], np.intp))
        # A node of the same step is not cut if the model has states alone: nothing else is in it.
        filled = self._filled.setdefault(saved.step_id, {})
        filled[saved.family, saved.unit] = (node, boundary - 1)

    def withdraw_checkpoint(self, lease: Lease, saved: Checkpoint) -> None:
        """An announced or pending state is not needed."""
        self._saved = [each for each in self._saved if each[1] is not saved]
        node = self._node_at(lease.cursor, saved.boundary - 1)
        if node is not None:
            place = saved.boundary - 1 - node.first
            if node.units[saved.family][place] == saved.unit:
                self._index.remove(node, saved.family, np.array([place]))

    def is_promised(self, node: Node, plane: int, unit: int) -> bool:
        """Whether a unit is already findable, but filled by a step that is not done."""
        return node.step_id > self.committed_step or any(
            (plane, unit) in filled for filled in self._filled.values()
        )

    def commit_step(self, step_id: StepId) -> list[tuple[int, list[Node]]]:
        """Announced pages are reliable now; returns the nodes, with the serial of their lease."""
        self.committed_step = max(self.committed_step, step_id)
        self._filled.pop(step_id, None)
        return self._pending.pop(step_id, [])

    def fail_step(self, step_id: StepId) -> None:
        """Pages announced for this step, and everything that depends on them, are no longer
        findable."""
        pending = self._pending.pop(step_id, [])
        for node in (node for _, nodes in pending for node in nodes):
            top: Node | None = None
            current: Node | None = node
            while current is not None and current.step_id == step_id:
                top = current if current.is_attached else top
                current = current.parent
            if top is not None:
                self._index.cut(top, top.first)
        for (plane, unit), (node, depth) in self._filled.pop(step_id, {}).items():
            owner = self._node_at(node, depth)
            if owner is not None and owner.units[plane][depth - owner.first] == unit:
                self._take_back(owner, plane, depth - owner.first)

    def _take_back(self, node: Node, plane: int, place: int) -> None:
        """A unit was never filled; on an ordered plane, nothing after it is usable either."""
        if not self._index.layout.planes[plane].is_ordered:
            self._index.remove(node, plane, np.array([place]))
            return
        for below in list(self._index.tree.subtree(node)):
            first = place if below is node else 0
            places = first + np.flatnonzero(below.units[plane][first:] != ABSENT)
            if below.is_attached:
                self._index.remove(below, plane, places)

    def publish(
        self, lease: Lease, tokens: Int32s, num_full: int, step_id: StepId, lengthen: bool
    ) -> list[Node]:
        """Index the first `num_full` pages of the lease; returns the nodes that got any. With
        `lengthen`, the last node of its path is extended instead of adding a node of the step,
        which is done."""
        if num_full <= lease.num_published_pages:
            return []
        if lengthen and self._lengthen(lease, tokens, num_full):
            return [lease.cursor]
        num_full = min(num_full, lease.num_allowed_pages)
        cursor, first = self._whence(lease)
        if num_full <= first:
            return []
        keys = tokens[first * self._page_size : num_full * self._page_size].tobytes()
        path = self._index.tree.insert(
            cursor, lease.key, keys, first, num_full, step_id, lengthen=lengthen
        )
        self._mark_end(path, (lease.num_prompt_tokens - 1) // self._page_size)
        touched = [node for node in path if self._fill(lease, node, first, num_full)]
        if self._forks is not None and self._forks.early:
            self._tell_forks(self._forks, touched, step_id)
        if not lengthen:
            self._remember(lease, touched, first, num_full, step_id)
        lease.cursor, lease.num_published_pages, lease.ahead = path[-1], num_full, None
        self.touch(path[-1], first)  # a split may have made this the end of a node
        self.touch(path[-1], num_full)
        self.offer_path(path[-1])  # a split may have left loose units in a new node
        return touched

    def _lengthen(self, lease: Lease, tokens: Int32s, end: int) -> bool:
        """Publish pages of an output after the last one, if no other request has published there;
        False if the case is not so simple. If a family keeps every page, the lease's units keep the
        path unchanged."""
        leaf, first = lease.cursor, lease.num_published_pages
        is_plain = self._has_spine and leaf.is_attached and leaf.end == first and leaf.may_grow
        if not is_plain or end > min(lease.num_allowed_pages, lease.key.run_end(first, end)):
            return False
        if leaf.owner != lease.key.at(first) or first * self._page_size < lease.num_prompt_tokens:
            return False
        units = [lease.tables[plane.family_index][first:end] for plane in self._paged]
        if any(np.count_nonzero(each == ABSENT) for each in units):
            return False
        keys = tokens[first * self._page_size : end * self._page_size].tobytes()
        self._index.lengthen_all(leaf, keys, dict(zip(self._paged_planes, units, strict=True)))
        leaf.last_used = leaf.last_resumed = self._tick = self._tick + 1
        lease.num_published_pages = end
        # Pages that were near the end before may be spare now.
        last, node = first - self._reach - NEAR, leaf
        while node.parent is not None and node.end > last:
            for evictor in self._near:
                evictor.offer(node)
            node = node.parent
        return True

    def _mark_end(self, path: list[Node], boundary: int) -> None:
        """A prompt ends at a boundary, if this path leads there. The end of the previous prompt
        that it continues no longer counts."""
        for node in path:
            if node.first < boundary <= node.end:
                node.prompt_end = boundary
                above = node.parent
                while above is not None and not above.is_fork:
                    above.prompt_end = 0
                    above = above.parent

    def _whence(self, lease: Lease) -> tuple[Node, int]:
        """Where the lease's path continues: its deepest node in the tree, and how many of its pages
        are left.

        A failed step or an eviction may have removed the others. No pages grow in their place
        (`Node.is_cut`), so a depth says which are left.
        """
        node = nearest_attached(lease.cursor)
        return node, min(lease.num_published_pages, node.end)

    def _tell_forks(self, forks: ForkShare, nodes: list[Node], step_id: StepId) -> None:
        for node in nodes:
            if node.step_id == step_id and node.parent is not None:
                page = node.keys[: self._page_bytes]
                forks.published(name_of(node.parent.serial, node.owner, page))

    def prefer_own(self, lease: Lease) -> bool:
        """If the tree has other requests' copies of the lease's pages, it holds both. Remove
        theirs; its own become findable with its next page. False if it holds none."""
        if not lease.duplicates:
            return False
        depth = self._first_copied(lease)
        if depth is not None:
            node = self._node_at(lease.cursor, depth)
            assert node is not None
            self._index.cut(node, depth)
            lease.num_published_pages = depth
        for plane, duplicates in lease.duplicates:
            self._index.pools[plane].drop(duplicates)
        lease.duplicates = ()
        return True

    def _first_copied(self, lease: Lease) -> int | None:
        """The first page for which the tree has another unit than the lease."""
        found: int | None = None
        node = nearest_attached(lease.cursor)
        while node.parent is not None:
            for plane in self._paged:
                if not plane.family.is_ordered:
                    continue
                own = lease.tables[plane.family_index][node.first : node.end]
                there = node.units[plane.index][: len(own)]
                places = ((there != ABSENT) & (own != ABSENT) & (there != own)).nonzero()[0]
                if len(places):
                    depth = node.first + int(places[0])
                    found = depth if found is None else min(found, depth)
            node = node.parent
        return found

    def publish_checkpoint(self, lease: Lease, checkpoint: Checkpoint) -> Node | None:
        """Index a saved state after published pages. The lease's hold ends in any case (P10): it
        moves to the index, or back to the pool."""
        pool = self._index.pools[checkpoint.family]
        unit = np.array([checkpoint.unit], np.intp)
        node: Node | None = None
        boundary = checkpoint.boundary
        if boundary <= min(lease.num_allowed_pages, lease.num_published_pages):
            node = self._node_at(lease.cursor, boundary - 1)
        if node is not None:
            place = np.array([boundary - 1 - node.first])
            if node.units[checkpoint.family][place[0]] == ABSENT:
                self._index.add(node, checkpoint.family, place, unit)
        pool.drop(unit)
        if node is not None:
            self._evictors[checkpoint.family].offer(node)
        return node

    def offer(self, node: Node) -> None:
        """Units along the path to `node` may have become loose."""
        for evictor in self._evictors:
            evictor.offer(node)

    def offer_path(self, node: Node) -> None:
        """Like `offer`, for every node of the path: units of unordered families may be loose
        anywhere."""
        current: Node | None = node
        while current is not None and current.parent is not None:
            self.offer(current)
            current = current.parent

    def offer_before(self, lease: Lease, plane: Plane) -> None:
        """Like `offer_path`, for units of one family that a lease held before its first live
        one."""
        evictor, end = self._evictors[plane.index], lease.first_live[plane.family_index]
        current: Node | None = nearest_attached(lease.cursor)
        while current is not None and current.parent is not None:
            if current.first < end:
                evictor.offer(current)
            current = current.parent

    def _fill(self, lease: Lease, node: Node, first: int, end: int) -> bool:
        """Put the lease's units into the pages of one node that have none."""
        begin, stop = max(first, node.first), min(end, node.end)
        at, upto = begin - node.first, stop - node.first
        self._index.fill_hashes(node)
        changed = False
        for plane in self._paged:
            own = lease.tables[plane.family_index][begin:stop]
            there = node.units[plane.index][at:upto]
            is_empty = node.counts[plane.index] == 0 or bool((there == ABSENT).all())
            if is_empty and begin >= lease.first_live[plane.family_index]:
                self._index.add(node, plane.index, slice(at, upto), own)
                changed = True
                continue
            changed |= self._fill_holes(lease, node, plane, at, own, there.copy())
        return changed

    def _remember(
        self, lease: Lease, nodes: list[Node], first: int, end: int, step_id: StepId
    ) -> None:
        """A failed step removes its own nodes completely; from older ones, it removes what it
        added."""
        for node in nodes:
            if node.step_id == step_id:
                continue
            filled = self._filled.setdefault(step_id, {})
            for depth in range(max(first, node.first), min(end, node.end)):
                for plane in self._paged:
                    unit = int(lease.tables[plane.family_index][depth])
                    if unit != ABSENT and node.units[plane.index][depth - node.first] == unit:
                        filled[plane.index, unit] = (node, depth)

    def _fill_holes(
        self, lease: Lease, node: Node, plane: Plane, at: int, own: Units, there: Units
    ) -> bool:
        places = ((there == ABSENT) & (own != ABSENT)).nonzero()[0]
        for run in _runs(places):
            self._index.add(node, plane.index, slice(at + run[0], at + run[-1] + 1), own[run])
        if plane.family.is_ordered:
            duplicates = there[(there != ABSENT) & (there != own)]
            if len(duplicates):
                self._index.pools[plane.index].hold(duplicates)
                lease.duplicates += ((plane.index, duplicates),)
        return len(places) > 0

    def _node_at(self, cursor: Node, depth: int) -> Node | None:
        node = nearest_attached(cursor)
        while node.parent is not None and node.first > depth:
            node = node.parent
        return node if node.first <= depth < node.end else None


def nearest_attached(node: Node) -> Node:
    while not node.is_attached and node.parent is not None:
        node = node.parent
    return node


def _runs(places: np.ndarray) -> list[np.ndarray]:
    """Consecutive places, run by run."""
    if len(places) == 0:
        return []
    return np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
