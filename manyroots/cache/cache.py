"""The facade: everything the scheduler may know of the prefix cache.

In: namespaces, tokens and how many of them a step will compute. Out: leases that hold pages.
A page is published, i.e. made findable, when the step that fills it is planned, if the family
allows reading it within that step, and is relied on for good when the step commits; a step that
fails takes its pages out again. Deterministic: the same calls give the same pages and victims.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from manyroots.cache.eviction import Evictor
from manyroots.cache.families.family import Family
from manyroots.cache.lease import Lease
from manyroots.cache.pool import PagePool
from manyroots.cache.tree import Node, PrefixTree, Walk
from manyroots.ids import Namespace, StepId
from manyroots.step import Int32s


class Refusal(enum.Enum):
    """Why the cache could not do as asked; nothing has changed then."""

    NO_ROOM = "no room"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request wants in order to begin."""

    namespace: Namespace
    tokens: Int32s
    """Every known token."""
    max_new_tokens: int
    """How many tokens it may compute in this step, behind what is found."""
    may_reuse: bool
    """False computes everything, e.g. because every position's logits are wanted."""
    num_must_fit_tokens: int
    """Refuse unless there is room for this many of its tokens, though fewer are computed now."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts that balance: free + cached + held = total."""

    num_pages: int
    num_free: int
    num_cached: int
    num_held: int
    total_lookup_tokens: int
    total_hit_tokens: int


class PrefixCache:
    """Pages for running requests, and the index of what can be reused."""

    def __init__(self, family: Family, num_pages: int, page_size: int, *, reuse: bool) -> None:
        self.family = family
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(page_size)
        self.open_leases: set[Lease] = set()
        self._evictor = Evictor(self.tree, self.pool)
        self._reuse = reuse
        self._pending: dict[StepId, list[Node]] = {}
        self._lookup_tokens = 0
        self._hit_tokens = 0

    @property
    def num_available_pages(self) -> int:
        """Pages that could be allocated now."""
        return self.pool.num_free + self.pool.num_cached

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def lookup(self, namespace: Namespace, tokens: Int32s) -> int:
        """How many leading tokens a request could reuse now. Changes nothing.

        At least one token is always left to compute: its logits are what the request came for.
        """
        return self._match(namespace, tokens).depth * self.page_size

    def reserve(self, demand: Demand) -> Lease | Refusal:
        """Claim what is found, then allocate for this step's tokens; all or nothing."""
        walk = self._match(demand.namespace, demand.tokens) if demand.may_reuse else None
        found = walk.pages if walk is not None else np.empty(0, np.int32)
        num_cached = len(found) * self.page_size
        num_tokens = min(len(demand.tokens), num_cached + demand.max_new_tokens)
        num_new = self.pages_for(num_tokens) - len(found)
        num_must_fit = self.pages_for(max(num_tokens, demand.num_must_fit_tokens)) - len(found)

        self.pool.hold(found)
        if num_must_fit > self.num_available_pages:
            self.pool.drop(found)
            return Refusal.NO_ROOM
        cursor = walk.node if walk is not None else self.tree.root
        self._evictor.touch(cursor)
        lease = Lease(demand.namespace, found.tolist() + self._allocate(num_new), cursor)
        lease.num_cached_tokens = num_cached
        lease.num_published_pages = len(found)
        self.open_leases.add(lease)
        if demand.may_reuse:
            self._lookup_tokens += len(demand.tokens)
            self._hit_tokens += num_cached
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> list[int] | Refusal:
        """Pages so that the lease covers `num_tokens` in all; the new ones, maybe none."""
        num_new = self.pages_for(num_tokens) - len(lease.pages)
        if num_new <= 0:
            return []
        if num_new > self.num_available_pages:
            return Refusal.NO_ROOM
        pages = self._allocate(num_new)
        lease.pages.extend(pages)
        return pages

    def announce(self, lease: Lease, tokens: Int32s, num_tokens: int, step_id: StepId) -> None:
        """Step `step_id`, being planned, will have computed the first `num_tokens` of `tokens`."""
        if self.family.shares_within_step:
            node = self._publish(lease, tokens, num_tokens, step_id, lengthen=False)
            if node is not None:
                self._pending.setdefault(step_id, []).append(node)

    def commit(self, lease: Lease, tokens: Int32s, num_tokens: int, step_id: StepId) -> None:
        """Step `step_id` has computed the first `num_tokens` of `tokens`: publish what is full."""
        self._publish(lease, tokens, num_tokens, step_id, lengthen=True)

    def commit_step(self, step_id: StepId) -> None:
        """What was announced for this step can now be relied on."""
        self._pending.pop(step_id, None)

    def fail_step(self, step_id: StepId) -> None:
        """The step gave nothing: what was announced for it is findable no more."""
        for node in self._pending.pop(step_id, []):
            top: Node | None = None
            current: Node | None = node
            while current is not None and current.step_id == step_id:
                top = current if current.is_attached else top
                current = current.parent
            if top is not None and top.parent is not None:
                self.pool.unindex(self.tree.cut(top))
                self._evictor.offer(top.parent)

    def release(self, lease: Lease) -> None:
        """Give the pages back. What was published stays findable until its room is needed."""
        if not lease.is_open:
            raise RuntimeError("a lease was released twice")
        lease.is_open = False
        self.open_leases.remove(lease)
        self.pool.drop(np.array(lease.pages, np.int32))
        for copies in lease.copies:
            self.pool.drop(copies)
        cursor = _nearest_attached(lease.cursor)
        self._evictor.touch(cursor)
        self._evictor.offer(cursor)

    def stats(self) -> CacheStats:
        return CacheStats(
            num_pages=self.pool.num_pages,
            num_free=self.pool.num_free,
            num_cached=self.pool.num_cached,
            num_held=self.pool.num_held,
            total_lookup_tokens=self._lookup_tokens,
            total_hit_tokens=self._hit_tokens,
        )

    def _match(self, namespace: Namespace, tokens: Int32s) -> Walk:
        max_pages = (len(tokens) - 1) // self.page_size if self._reuse else 0
        return self.tree.match(namespace, self._keys(tokens, 0, max_pages), max_pages)

    def _allocate(self, count: int) -> list[int]:
        shortage = count - self.pool.num_free
        if shortage > 0:
            self._evictor.evict(shortage)
        return self.pool.take(count)

    def _publish(
        self, lease: Lease, tokens: Int32s, num_tokens: int, step_id: StepId, *, lengthen: bool
    ) -> Node | None:
        """Index the lease's full pages up to `num_tokens`; the node, if any page was new."""
        num_full = min(num_tokens, len(tokens)) // self.page_size
        first = lease.num_published_pages
        if not self._reuse or num_full <= first:
            return None
        cursor = _nearest_attached(lease.cursor)
        # Earlier than what was published only if a failed step took a part of our path with it.
        first = min(first, cursor.end)
        pages = np.array(lease.pages[first:num_full], np.int32)
        keys = self._keys(tokens, first, num_full)
        inserted = self.tree.insert(
            cursor, lease.namespace, keys, first, pages, step_id, lengthen=lengthen
        )
        lease.cursor, lease.num_published_pages = inserted.node, num_full
        copies = inserted.copies
        copies = copies[copies != pages[: len(copies)]]
        if len(copies):
            self.pool.hold(copies)
            lease.copies.append(copies)
        self.pool.index(inserted.added)
        self._evictor.touch(inserted.node)
        return inserted.node if len(inserted.added) else None

    def _keys(self, tokens: Int32s, first: int, end: int) -> bytes:
        return tokens[first * self.page_size : end * self.page_size].tobytes()


def _nearest_attached(node: Node) -> Node:
    while not node.is_attached and node.parent is not None:
        node = node.parent
    return node
