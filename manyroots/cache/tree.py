"""A compressed radix tree over whole pages of tokens, with the units of each page by plane.

A child is found by (owner, tokens of its first page), so two sequences diverge at the first page
that differs in either. There is no sentinel page and no depth offset. Matching compares tokens
exactly and changes nothing. Depths count pages from the root.

Structure only: knows tokens and unit numbers, but not the holders of a unit or when it is evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manyroots.cache.keys import Owner, PrefixKey
from manyroots.cache.planes import ABSENT, Units
from manyroots.ids import HASH_BYTES, Namespace, StepId

TOKEN_BYTES = 4

ChildKey = tuple[Owner, bytes]
Indices = npt.NDArray[np.intp]
PageRange = slice | Indices
"""Pages of one node, counted from its first."""


class PrefixMark:
    """A reason to keep some nodes (`retention.py`). Shared by all nodes that one range of a request
    marks."""

    __slots__ = ("is_over", "nodes", "num_pages", "priority", "serial", "tenant", "until_s")

    def __init__(self, tenant: str | None, priority: int, until_s: float, serial: int) -> None:
        self.tenant = tenant
        self.priority = priority
        self.until_s = until_s
        self.serial = serial
        """Order of creation."""
        self.num_pages = 0
        """Pages of its nodes when they were marked."""
        self.nodes: list[Node] = []
        """Nodes that it was given to; some may have another by now, or have left the tree."""
        self.is_over = False


class PathHold:
    """One hold on all units of a path, for every lease that found exactly this path: another lease
    costs a count instead of a pass over the units (`sole.py`)."""

    __slots__ = ("depth", "node", "num_leases", "units")

    def __init__(self, node: Node, units: Units) -> None:
        self.node = node
        """The node that the path ends in."""
        self.units = units
        self.depth = len(units)
        self.num_leases = 0


class Node:
    """A run of pages, of one owner, that every path through it shares."""

    __slots__ = (
        "below",
        "children",
        "counts",
        "end",
        "first",
        "hashes",
        "is_attached",
        "is_cut",
        "is_fork",
        "is_repeated",
        "keys",
        "last_arrived",
        "last_resumed",
        "last_used",
        "mark",
        "num_hits",
        "num_pages",
        "owner",
        "parent",
        "path_hold",
        "prompt_end",
        "queued",
        "serial",
        "step_id",
        "units",
    )

    def __init__(
        self,
        parent: Node | None,
        owner: Owner | None,
        first: int,
        keys: bytes,
        hashes: bytes,
        units: list[Units],
        step_id: StepId,
        serial: int,
    ) -> None:
        self.parent = parent
        """None for the root. A node that has left the tree keeps it, so that code with a reference
        finds the nearest node still in the tree."""
        self.is_attached = True
        self.is_cut = False
        """Whether pages after its last one were removed. It is not lengthened any more, so that a
        depth never comes to mean another page: copies in progress and leases go by depths below the
        nearest node that is left."""
        self.owner = owner
        """None only for the root."""
        self.first = first
        """Depth of the first page of this node."""
        self.keys = keys
        self.hashes = hashes
        """HASH_BYTES per page if hashes are needed, otherwise empty."""
        self.units = units
        """For each plane, one unit or ABSENT per page."""
        self.num_pages = len(units[0])
        self.end = first + self.num_pages
        """Depth just past the last page."""
        self.counts = [0] * len(units)
        """For each plane, the number of units."""
        self.below = [0] * len(units)
        """For each plane, the number of children with any."""
        self.step_id = step_id
        """The step that fills these pages; they are reliable once it has committed."""
        self.serial = serial
        """Order of creation: breaks every tie, so that ranks agree on victims."""
        self.children: dict[ChildKey, Node] = {}
        self.last_used = 0
        """When this node, or anything removed from below it, was last used."""
        self.last_resumed = 0
        """When a request last continued from its end or a little after it, or ended there: the use
        that counts for a family with a window."""
        self.last_arrived = 0
        """When a copy to the host last ended here or below; counts as use only there."""
        self.num_hits = 0
        """Requests that resumed from here, or from anything removed from below it."""
        self.is_fork = False
        """Whether requests have continued from here in more than one way, or have repeated it
        unchanged; also counts what was removed from below it."""
        self.is_repeated = False
        """Whether a request has found its prompt up to here, with nothing to add."""
        self.prompt_end = 0
        """The boundary in this node at which the newest prompt ended; 0 if none did."""
        self.mark: PrefixMark | None = None
        """The newest mark, which may have ended."""
        self.path_hold: PathHold | None = None
        """A hold on a path that ends in this node, which the next lease shares."""
        self.queued = 0
        """Bit set of the eviction queues that have this node, by plane: first the main queues, then
        those of spare units."""

    @property
    def is_marked(self) -> bool:
        return self.mark is not None and not self.mark.is_over

    @property
    def may_grow(self) -> bool:
        """Whether pages may be added after its last one, rather than a node below it."""
        return not self.children and not self.is_marked and not self.is_cut

    @property
    def namespace(self) -> Namespace | None:
        return None if self.owner is None else self.owner.namespace


class Walk(NamedTuple):
    """The path of a prompt's tokens."""

    nodes: Sequence[Node]
    depth: int
    """Pages matched; the last node may match in part."""


class PrefixTree:
    """Finds, adds and removes runs of pages by their tokens."""

    def __init__(self, page_size: int, num_planes: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._num_planes = num_planes
        self._serial = 0
        empty = [np.empty(0, np.intp) for _ in range(num_planes)]
        self.root = Node(None, None, 0, b"", b"", empty, StepId(0), 0)
        self.by_namespace: dict[Namespace, dict[int, Node]] = {}
        """By serial: nodes of a namespace whose parent belongs to another, where the namespace
        starts."""
        self.first_pages: Counter[tuple[str | None, bytes]] = Counter()
        """By salt and tokens of a first page: the number of owners."""

    def walk(
        self, key: PrefixKey, keys: bytes, max_pages: int
    ) -> tuple[list[Node], int, ChildKey | None]:
        """Follow the first `max_pages` of `keys`, the tokens of a whole prompt. Returns the nodes
        on the path, their number of pages (the last node may match in part), and the tree's key of
        the next page, or None if no more were requested."""
        nodes: list[Node] = []
        node = self.root
        depth, size = 0, self._page_bytes
        owner, run_end = key.first_run
        while depth < max_pages:
            if depth >= run_end:
                owner, run_end = key.run_at(depth)
            at = depth * size
            ahead = (owner, keys[at : at + size])
            child = node.children.get(ahead)
            if child is None:
                return nodes, depth, ahead
            nodes.append(child)
            end = run_end if run_end < max_pages else max_pages
            if child.end <= end and keys.startswith(child.keys, at):  # compares without copying
                node, depth = child, child.end
                continue
            depth += self.shared_run(child, keys, depth, depth, end)
            if depth < max_pages:
                at = depth * size
                return nodes, depth, (key.at(depth), keys[at : at + size])
        return nodes, depth, None

    def has_elsewhere(self, key: PrefixKey, page: bytes, walk: Walk) -> bool:
        """Whether another owner, an adapter or the base model, has the page after a walk, which its
        own owner lacks.

        Never checks another tenant (salt): a tenant must not learn what others have cached. After
        the first page, where an adapter takes over, only base is checked.
        """
        if walk.depth == 0:
            return self.first_pages[key.at(0).namespace.salt, page] > 0
        if walk.depth != key.switch_page:
            return False
        node = walk.nodes[-1]
        if node.end == walk.depth:
            return (key.at(0), page) in node.children
        return node.keys.startswith(page, (walk.depth - node.first) * self._page_bytes)

    def insert(
        self,
        start: Node,
        key: PrefixKey,
        keys: bytes,
        first: int,
        end: int,
        step: StepId,
        *,
        lengthen: bool,
    ) -> list[Node]:
        """Make a path for pages [first, end) of a sequence, whose tokens are `keys`.

        `start` covers depth `first` or ends there. Returns the nodes that cover those pages, in
        order; new ones have no units yet. With `lengthen`, a leaf is extended if possible instead
        of adding a node of `step`.
        """
        node = start
        while node.first >= first and node.parent is not None:
            node = node.parent
        path: list[Node] = []
        depth = first
        while depth < end:
            if depth == node.end:
                at = (depth - first) * self._page_bytes
                child = node.children.get((key.at(depth), keys[at : at + self._page_bytes]))
                if child is None:
                    break
                node = child
            if node.owner == key.at(depth):
                run_end = key.run_end(depth, end)
                depth += self.shared_run(node, keys, depth - first, depth, run_end)
            if depth < min(node.end, end):
                node = self.split(node, depth)
                path.append(node)
                break
            path.append(node)
        if path and path[0].first < first and path[0].end <= first:
            path.pop(0)
        while depth < end:
            run_end = key.run_end(depth, end)
            own = keys[(depth - first) * self._page_bytes : (run_end - first) * self._page_bytes]
            owner = key.at(depth)
            if lengthen and node.may_grow and node.owner == owner:
                units = [absent(run_end - depth) for _ in range(self._num_planes)]
                self.lengthen(node, own, units)
                if not path or path[-1] is not node:
                    path.append(node)
            else:
                units = [absent(run_end - depth) for _ in range(self._num_planes)]
                node = self.add(node, (owner, own[: self._page_bytes]), own, units, step)
                path.append(node)
            depth = run_end
        return path

    def set_units(self, node: Node, plane: int, places: PageRange, units: Units) -> None:
        """Put units into pages of a node that have none on this plane."""
        was = node.counts[plane]
        node.units[plane][places] = units
        node.counts[plane] = was + len(units)
        if was == 0 and len(units) and node.parent is not None:
            node.parent.below[plane] += 1

    def clear_units(self, node: Node, plane: int, places: Indices) -> Units:
        """Remove and return the units of these pages."""
        removed = node.units[plane][places]
        node.units[plane][places] = ABSENT
        node.counts[plane] -= len(places)
        if node.counts[plane] == 0 and len(places) and node.parent is not None:
            node.parent.below[plane] -= 1
        return removed

    def split(self, node: Node, depth: int) -> Node:
        """Cut a node in two at `depth`; returns the new upper part.

        The lower part keeps the object, so references to the end of the run stay valid.
        """
        parent = node.parent
        assert parent is not None
        assert node.owner is not None
        count = depth - node.first
        cut = count * self._page_bytes
        self._serial += 1
        upper = Node(
            parent,
            node.owner,
            node.first,
            node.keys[:cut],
            node.hashes[: count * HASH_BYTES],
            [units[:count].copy() for units in node.units],
            node.step_id,
            self._serial,
        )
        upper.counts = _counts(upper.units)
        upper.last_used, upper.last_arrived = node.last_used, node.last_arrived
        upper.last_resumed = node.last_resumed
        upper.is_fork, upper.mark = node.is_fork, node.mark
        if node.mark is not None:
            node.mark.nodes.append(upper)
        if node.prompt_end <= depth:
            upper.prompt_end, node.prompt_end = node.prompt_end, 0
        held = node.path_hold
        if held is not None and held.depth <= depth:
            upper.path_hold, node.path_hold, held.node = held, None, upper
        parent.children[(node.owner, node.keys[: self._page_bytes])] = upper
        starts = self.by_namespace.get(node.owner.namespace)
        if starts is not None and starts.pop(node.serial, None) is not None:
            starts[upper.serial] = upper
        before = node.counts
        node.parent, node.first = upper, depth
        node.keys, node.hashes = node.keys[cut:], node.hashes[count * HASH_BYTES :]
        node.units = [units[count:].copy() for units in node.units]
        node.num_pages -= count
        node.counts = [all_ - up for all_, up in zip(before, upper.counts, strict=True)]
        for plane in range(self._num_planes):
            upper.below[plane] = int(node.counts[plane] > 0)
            parent.below[plane] += int(upper.counts[plane] > 0) - int(before[plane] > 0)
        upper.children[(node.owner, node.keys[: self._page_bytes])] = node
        return upper

    def cut(self, node: Node, depth: int) -> list[Node]:
        """Remove every page from `depth` on that is reached through `node`.

        Returns the removed nodes with their units; a new node holds what `node` itself loses.
        """
        removed = [gone for child in list(node.children.values()) for gone in self._prune(child)]
        if depth <= node.first:
            return removed + self._prune(node)
        if depth < node.end:
            removed.append(self._trim(node, depth - node.first))
        return removed

    def subtree(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            current = stack.pop()
            yield current
            stack.extend(current.children.values())

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first; for audits."""
        for child in self.root.children.values():
            yield from self.subtree(child)

    def _prune(self, node: Node) -> list[Node]:
        removed = list(self.subtree(node))
        parent = node.parent
        assert parent is not None
        assert node.owner is not None
        first_page = node.keys[: self._page_bytes]
        del parent.children[(node.owner, first_page)]
        if parent is self.root:
            known = (node.owner.namespace.salt, first_page)
            self.first_pages[known] -= 1
            if not self.first_pages[known]:
                del self.first_pages[known]
        parent.is_cut = True
        parent.last_used = max(parent.last_used, *(gone.last_used for gone in removed))
        parent.is_fork = parent.is_fork or any(gone.is_fork for gone in removed)
        parent.num_hits += sum(gone.num_hits for gone in removed)
        for plane in range(self._num_planes):
            parent.below[plane] -= int(node.counts[plane] > 0)
        for gone in removed:
            gone.is_attached = False
            assert gone.owner is not None
            namespace = gone.owner.namespace
            starts = self.by_namespace.get(namespace)
            if starts is not None and starts.pop(gone.serial, None) is not None and not starts:
                del self.by_namespace[namespace]
        return removed

    def _trim(self, node: Node, count: int) -> Node:
        """Keep the first `count` pages of a leaf; returns the rest."""
        cut = count * self._page_bytes
        rest = Node(
            node.parent,
            node.owner,
            node.first + count,
            node.keys[cut:],
            node.hashes[count * HASH_BYTES :],
            [units[count:] for units in node.units],
            node.step_id,
            node.serial,
        )
        rest.counts = _counts(rest.units)
        rest.is_attached = False
        node.keys, node.hashes = node.keys[:cut], node.hashes[: count * HASH_BYTES]
        node.units = [units[:count].copy() for units in node.units]
        node.num_pages = count
        node.end = node.first + count
        node.is_cut = True
        if node.prompt_end > node.end:
            node.prompt_end = 0
        if node.path_hold is not None and node.path_hold.depth > node.end:
            node.path_hold = None  # other units may follow
        for plane, lost in enumerate(rest.counts):
            node.counts[plane] -= lost
            if lost and node.counts[plane] == 0 and node.parent is not None:
                node.parent.below[plane] -= 1
        return rest

    def lengthen(self, node: Node, keys: bytes, more: list[Units]) -> None:
        """Add pages to a leaf. The caller that adds units counts them."""
        count = len(more[0])
        node.keys += keys
        node.units = [np.concatenate(both) for both in zip(node.units, more, strict=True)]
        node.num_pages += count
        node.end += count

    def add(
        self, parent: Node, page: ChildKey, keys: bytes, units: list[Units], step: StepId
    ) -> Node:
        """A new leaf, whose first page is `page`. The caller that adds units counts them."""
        self._serial += 1
        owner, first_page = page
        namespace = owner.namespace
        if parent.children:
            parent.is_fork = True
        node = Node(parent, owner, parent.end, keys, b"", units, step, self._serial)
        parent.children[page] = node
        if parent is self.root:
            self.first_pages[namespace.salt, first_page] += 1
        if parent.owner is None or parent.owner.namespace != namespace:
            self.by_namespace.setdefault(namespace, {})[node.serial] = node
        return node

    def shared_run(self, node: Node, keys: bytes, index: int, depth: int, end: int) -> int:
        """How many pages of `node` from `depth` on equal `keys` from page `index` on."""
        size = self._page_bytes
        count = min(node.end, end) - depth
        offset, at = (depth - node.first) * size, index * size
        if node.keys[offset : offset + count * size] == keys[at : at + count * size]:
            return count
        # The runs differ: bisect to the first page that differs.
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            begin, stop = low * size, middle * size
            same = node.keys[offset + begin : offset + stop] == keys[at + begin : at + stop]
            low, high = (middle, high) if same else (low, middle)
        return low


_ABSENTS = np.full(1024, ABSENT, np.intp)


def absent(count: int) -> Units:
    """This many pages without a unit: a copy, which is faster than filling."""
    return _ABSENTS[:count].copy() if count <= len(_ABSENTS) else np.full(count, ABSENT, np.intp)


def _counts(units: list[Units]) -> list[int]:
    return [int(np.count_nonzero(plane != ABSENT)) for plane in units]
