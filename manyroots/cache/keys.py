"""What identifies a page: whose weights computed it, for whom, and every token up to its end.

Inside the process tokens are compared exactly. Where a page leaves it (storage, events), it is
known by a hash chained over its prefix: domain-tagged and length-framed, so that no tokens, salt
or adapter can be mistaken for another field (N04, N11).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from manyroots.ids import Namespace

HASH_BYTES = 32
_DOMAIN = b"manyroots page 1"


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """The namespace of each page of a sequence.

    Nearly always one namespace. An activated adapter (aLoRA) leaves the tokens before its
    invocation to the base model: pages wholly before it are the base's, so that they are shared
    with it, and those from `switch_page` on are the adapter's (N22).
    """

    namespace: Namespace
    switch_page: int | None = None
    later_namespace: Namespace | None = None

    @classmethod
    def activated(
        cls, base: Namespace, adapter: Namespace, num_base_tokens: int, page_size: int
    ) -> PrefixKey:
        switch = num_base_tokens // page_size
        return cls(adapter) if switch == 0 else cls(base, switch, adapter)

    def at(self, page: int) -> Namespace:
        if self.switch_page is None or page < self.switch_page:
            return self.namespace
        assert self.later_namespace is not None
        return self.later_namespace

    def run_end(self, page: int, end: int) -> int:
        """How far from `page` on, at most to `end`, the namespace stays the same."""
        if self.switch_page is None or page >= self.switch_page:
            return end
        return min(end, self.switch_page)

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        if self.later_namespace is None:
            return (self.namespace,)
        return (self.namespace, self.later_namespace)


class PageHasher:
    """Hashes pages of one model in one layout."""

    def __init__(self, identity: bytes, page_bytes: int) -> None:
        """`identity` stands for model, dtype, page size and families: other bytes, other pages."""
        self.root = hashlib.blake2b(_framed(_DOMAIN, identity), digest_size=HASH_BYTES).digest()
        self.page_bytes = page_bytes
        self._seeds: dict[Namespace, bytes] = {}

    def chain(self, parent: bytes, namespace: Namespace, keys: bytes) -> list[bytes]:
        """The hashes of consecutive pages behind the page hashed `parent`."""
        seed = self._seed(namespace)
        size, blake2b = self.page_bytes, hashlib.blake2b
        hashes = []
        # Fixed-size fields first and the tokens last: nothing needs a length of its own.
        for at in range(0, len(keys), size):
            parent = blake2b(seed + parent + keys[at : at + size], digest_size=HASH_BYTES).digest()
            hashes.append(parent)
        return hashes

    def _seed(self, namespace: Namespace) -> bytes:
        """The namespace in 32 bytes, part of every page's hash."""
        seed = self._seeds.get(namespace)
        if seed is None:
            adapter = b"base" if namespace.adapter is None else b"adapter" + namespace.adapter
            salt = b"none" if namespace.salt is None else b"salt" + namespace.salt.encode()
            framed = _framed(_DOMAIN, adapter, salt)
            seed = hashlib.blake2b(framed, digest_size=HASH_BYTES).digest()
            self._seeds[namespace] = seed
        return seed


def _framed(*fields: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)
