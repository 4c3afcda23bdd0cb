"""The page hashes of a prompt, as engines call the same pages in their events."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from manyroots.cache.keys import Owner, PageHasher, short_hash
from manyroots.ids import Namespace

_TOKEN_BYTES = 4


class PromptHasher:
    """Hashes prompts of one model. An activated adapter (aLoRA) has other owners for its first
    pages: its prompts are found only where the whole prefix is the adapter's own."""

    def __init__(self, identity: bytes, page_size: int) -> None:
        """`identity`: of the model and its page layout (`EngineInfo.page_identity`)."""
        self._hasher = PageHasher(identity, page_size * _TOKEN_BYTES)
        self._page_size = page_size

    def hashes(self, prompt: Sequence[int], namespace: Namespace) -> list[int]:
        """Of every full page; the last 64 bits of each, as in KV events."""
        tokens = prompt if isinstance(prompt, array) else array("i", prompt)
        # The page of the last token is never reused whole: that token is computed.
        num_pages = (len(tokens) - 1) // self._page_size
        keys = tokens.tobytes()[: num_pages * self._page_size * _TOKEN_BYTES]
        pages = self._hasher.chain(self._hasher.root, Owner(namespace, 0), keys)
        return [short_hash(page) for page in pages]
