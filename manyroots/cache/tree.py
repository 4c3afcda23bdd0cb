"""A compressed radix tree over whole pages of tokens.

A child is found by (namespace, tokens of its first page), so two namespaces part at the first page
that differs in either: there is no sentinel page and no depth offset. Matching compares tokens
exactly and changes nothing. Depths count pages from the root.

Knows tokens and page numbers; not who holds a page, nor when one is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from manyroots.ids import Namespace, StepId
from manyroots.step import Int32s

TOKEN_BYTES = 4

ChildKey = tuple[Namespace, bytes]


class Node:
    """A run of pages that every path through it shares."""

    __slots__ = (
        "children",
        "first",
        "is_attached",
        "is_queued",
        "keys",
        "last_used",
        "namespace",
        "pages",
        "parent",
        "serial",
        "step_id",
    )

    def __init__(
        self,
        parent: Node | None,
        namespace: Namespace | None,
        first: int,
        keys: bytes,
        pages: Int32s,
        step_id: StepId,
        serial: int,
    ) -> None:
        self.parent = parent
        """None for the root. A node that has left the tree keeps it, so that whoever still points
        here finds the nearest node that is left."""
        self.is_attached = True
        self.namespace = namespace
        self.first = first
        """Depth of the first page of this node."""
        self.keys = keys
        self.pages = pages
        self.step_id = step_id
        """The step that fills these pages; they can be relied on once it has committed."""
        self.serial = serial
        """Order of creation: breaks every tie, so that ranks agree on victims."""
        self.children: dict[ChildKey, Node] = {}
        self.last_used = 0
        self.is_queued = False

    @property
    def end(self) -> int:
        """Depth just past the last page."""
        return self.first + len(self.pages)

    @property
    def is_leaf(self) -> bool:
        return not self.children


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a descent ended: the deepest node reached and the pages on the way."""

    node: Node
    pages: Int32s

    @property
    def depth(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of a run of pages offered to the tree."""

    node: Node
    """Deepest node of the path."""
    copies: Int32s
    """Pages that someone else had indexed already, in place of the first of ours."""
    added: Int32s
    """The rest of ours, now indexed."""


class PrefixTree:
    """Finds, adds and removes runs of pages by their tokens."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._serial = 0
        self.root = Node(None, None, 0, b"", np.empty(0, np.int32), StepId(0), 0)

    def match(self, namespace: Namespace, keys: bytes, max_pages: int) -> Walk:
        """The longest indexed run that begins `keys`, at most `max_pages` of it."""
        node, depth = self.root, 0
        runs: list[Int32s] = []
        while depth < max_pages:
            child = node.children.get((namespace, self._page_key(keys, depth)))
            if child is None:
                break
            shared = self._shared_run(child, keys, depth, depth, max_pages)
            runs.append(child.pages[:shared])
            depth += shared
            node = child
            if shared < len(child.pages):
                break
        pages = np.concatenate(runs) if runs else np.empty(0, np.int32)
        return Walk(node, pages)

    def insert(
        self,
        start: Node,
        namespace: Namespace,
        keys: bytes,
        first: int,
        pages: Int32s,
        step: StepId,
        *,
        lengthen: bool,
    ) -> Inserted:
        """Index `pages`, which hold `keys` and begin at depth `first`, on the path of `start`.

        `start` covers depth `first` or reaches just up to it. Pages already indexed by someone
        else's copy are left as they are; behind them all are new: with `lengthen` in a leaf made
        longer where that is possible, else in a node of `step`.
        """
        node = start
        while node.first >= first and node.parent is not None:
            node = node.parent
        depth, end = first, first + len(pages)
        copies: list[Int32s] = [np.empty(0, np.int32)]
        while depth < end:
            if depth == node.end:
                child = node.children.get((namespace, self._page_key(keys, depth - first)))
                if child is None:
                    break
                node = child
            shared = self._shared_run(node, keys, depth - first, depth, end)
            begin = depth - node.first
            copies.append(node.pages[begin : begin + shared])
            depth += shared
            if depth < min(node.end, end):
                node = self.split(node, depth)
                break
        num_copies = depth - first
        if depth < end:
            own = keys[num_copies * self._page_bytes :]
            if lengthen and node.is_leaf and node.namespace == namespace:
                node.keys += own
                node.pages = np.concatenate([node.pages, pages[num_copies:]])
            else:
                node = self._add(node, namespace, own, pages[num_copies:], step)
        return Inserted(node, np.concatenate(copies), pages[num_copies:])

    def split(self, node: Node, depth: int) -> Node:
        """Cut a node in two at `depth`; returns the new upper part.

        The lower part keeps the object, so that whoever points at the end of the run still does.
        """
        assert node.parent is not None
        assert node.namespace is not None
        count = depth - node.first
        cut = count * self._page_bytes
        self._serial += 1
        upper = Node(
            node.parent,
            node.namespace,
            node.first,
            node.keys[:cut],
            node.pages[:count],
            node.step_id,
            self._serial,
        )
        upper.last_used = node.last_used
        node.parent.children[(node.namespace, node.keys[: self._page_bytes])] = upper
        node.parent, node.first = upper, depth
        node.keys, node.pages = node.keys[cut:], node.pages[count:]
        upper.children[(node.namespace, node.keys[: self._page_bytes])] = node
        return upper

    def trim(self, leaf: Node, count: int) -> Int32s:
        """Take the last `count` pages off a leaf; a leaf left empty leaves the tree."""
        removed = leaf.pages[len(leaf.pages) - count :]
        if count == len(leaf.pages):
            self._detach(leaf)
        else:
            leaf.pages = leaf.pages[: len(leaf.pages) - count]
            leaf.keys = leaf.keys[: len(leaf.pages) * self._page_bytes]
        return removed

    def cut(self, node: Node) -> Int32s:
        """Remove a node with everything below it; returns their pages, deepest last."""
        removed = list(self._subtree(node))
        self._detach(node)
        for child in removed:
            child.is_attached = False
        return np.concatenate([child.pages for child in removed])

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first; for audits."""
        for child in self.root.children.values():
            yield from self._subtree(child)

    def _add(
        self, parent: Node, namespace: Namespace, keys: bytes, pages: Int32s, step: StepId
    ) -> Node:
        self._serial += 1
        node = Node(parent, namespace, parent.end, keys, pages, step, self._serial)
        parent.children[(namespace, keys[: self._page_bytes])] = node
        return node

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        assert node.namespace is not None
        del node.parent.children[(node.namespace, node.keys[: self._page_bytes])]
        node.is_attached = False

    def _subtree(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            current = stack.pop()
            yield current
            stack.extend(current.children.values())

    def _page_key(self, keys: bytes, index: int) -> bytes:
        return keys[index * self._page_bytes : (index + 1) * self._page_bytes]

    def _shared_run(self, node: Node, keys: bytes, index: int, depth: int, end: int) -> int:
        """How many pages of `node` from `depth` on equal `keys` from page `index` on."""
        size = self._page_bytes
        count = min(node.end, end) - depth
        offset, at = (depth - node.first) * size, index * size
        if node.keys[offset : offset + count * size] == keys[at : at + count * size]:
            return count
        # The runs differ somewhere: halve towards the first page that does.
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            begin, stop = low * size, middle * size
            same = node.keys[offset + begin : offset + stop] == keys[at + begin : at + stop]
            low, high = (middle, high) if same else (low, middle)
        return low
