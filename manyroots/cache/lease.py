"""What the cache hands out: a request's right to its pages, given back exactly once."""

from __future__ import annotations

from manyroots.cache.tree import Node
from manyroots.ids import Namespace
from manyroots.step import Int32s


class Lease:
    """The pages one request holds, in the order of its tokens. Only the cache changes it."""

    __slots__ = (
        "copies",
        "cursor",
        "is_open",
        "namespace",
        "num_cached_tokens",
        "num_published_pages",
        "pages",
    )

    def __init__(self, namespace: Namespace, pages: list[int], cursor: Node) -> None:
        self.namespace = namespace
        self.pages = pages
        self.cursor = cursor
        """Deepest node of the tree on this request's path, as of its last publication."""
        self.copies: list[Int32s] = []
        """Pages of others that the tree leads through in place of ours, because they computed the
        same tokens first. Held too: what is held must have only held pages above it."""
        self.num_cached_tokens = 0
        """Tokens that were found, and need not be computed, when the lease was made."""
        self.num_published_pages = len(pages)
        """How many of `pages`, from the front, have been offered to the tree."""
        self.is_open = True
