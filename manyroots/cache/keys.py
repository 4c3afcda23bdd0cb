"""The identity of a page: the weights that computed it, from which token on, the tenant, and every
token up to its end.

Inside the process, tokens are compared exactly. Outside of it (storage, events), a page is named by
a hash chained over its prefix. The hash is domain-tagged and length-framed, so that tokens, salts
and adapters cannot be confused with each other (N04, N11).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Container
from typing import NamedTuple

from manyroots.ids import HASH_BYTES, Namespace

_DOMAIN = b"manyroots page 2"
_MAX_SEEDS = 4096
"""Owners whose seed is remembered. Callers choose salts, so remembering all would take too much."""
ENDLESS = sys.maxsize
"""More pages than any sequence has."""


class Owner(NamedTuple):
    """The owner of a page. Pages of different owners are never shared, whatever their tokens.

    A tuple, because the prefix tree hashes one for every node that it passes.
    """

    namespace: Namespace
    begin: int
    """The first token of the page that the namespace's weights computed; the base model computed
    those before it. 0 except in the one page in which an activated adapter starts (N23)."""


class PrefixKey:
    """The owner of each page of a sequence.

    Nearly always one namespace. An activated adapter (aLoRA) leaves the tokens before its
    invocation to the base model. Pages entirely before it belong to the base model and are shared
    with it; later ones belong to the adapter (N22). Its start may depend on tokens after a page, so
    two prompts can share a page's tokens and start the adapter at different ones. The page in which
    it starts therefore records the position (N23).
    """

    __slots__ = ("_rest", "first_run", "switch_page")

    def __init__(self, namespace: Namespace) -> None:
        self.first_run: tuple[Owner, int] = (Owner(namespace, 0), ENDLESS)
        """Consecutive pages of one owner, and their end. Separate from the others, because it is
        nearly always the only run."""
        self._rest: tuple[tuple[Owner, int], ...] = ()
        """Further runs; the last has no end."""
        self.switch_page: int | None = None
        """The first page with tokens of an activated adapter."""

    @classmethod
    def activated(
        cls, base: Namespace, adapter: Namespace, num_base_tokens: int, page_size: int
    ) -> PrefixKey:
        """The key of a sequence whose first `num_base_tokens` the base model computes."""
        key = cls(adapter)
        key.switch_page, begin = divmod(num_base_tokens, page_size)
        before: list[tuple[Owner, int]] = []
        if key.switch_page:
            before.append((Owner(base, 0), key.switch_page))
        if begin:
            before.append((Owner(adapter, begin), key.switch_page + 1))
        key.first_run, *rest = (*before, *key._runs)
        key._rest = tuple(rest)
        return key

    @property
    def _runs(self) -> tuple[tuple[Owner, int], ...]:
        return (self.first_run, *self._rest)

    def at(self, page: int) -> Owner:
        return self.run_at(page)[0]

    def run_at(self, page: int) -> tuple[Owner, int]:
        """The owner of a page, and the first later page with another owner."""
        if page < self.first_run[1]:
            return self.first_run
        return next(run for run in self._rest if page < run[1])

    def run_end(self, page: int, most: int) -> int:
        """The end of the run with the same owner from `page` on, at most `most`."""
        return min(self.run_at(page)[1], most)

    def common_run(self, other: PrefixKey) -> int:
        """How many first pages have the same owner in both; counts only the first run if the keys
        differ."""
        if self == other:
            return ENDLESS
        (owner, end), (other_owner, other_end) = self.first_run, other.first_run
        return min(end, other_end) if owner == other_owner else 0

    def first_page_of(self, namespaces: Container[Namespace]) -> int:
        """The first page that one of these owns; beyond every page if none does."""
        begin = 0
        for owner, end in self._runs:
            if owner.namespace in namespaces:
                return begin
            begin = end
        return ENDLESS

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        return tuple(dict.fromkeys(owner.namespace for owner, _ in self._runs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixKey) and self._runs == other._runs

    def __hash__(self) -> int:
        return hash(self._runs)


class PageHasher:
    """Hashes pages of one model in one layout."""

    def __init__(self, identity: bytes, page_bytes: int) -> None:
        """`identity` identifies model, dtype, page size and families: other bytes, other pages."""
        self.identify(identity)
        self.page_bytes = page_bytes
        self._seeds: dict[Owner, bytes] = {}

    def identify(self, identity: bytes) -> None:
        """Pages belong to another model from now on."""
        self.root = hashlib.blake2b(framed(_DOMAIN, identity), digest_size=HASH_BYTES).digest()

    def chain(self, parent: bytes, owner: Owner, keys: bytes) -> list[bytes]:
        """The hashes of consecutive pages after the page hashed `parent`."""
        seed = self._seed(owner)
        size, blake2b = self.page_bytes, hashlib.blake2b
        hashes = []
        # Fixed-size fields first and the tokens last, so no field needs a length.
        for at in range(0, len(keys), size):
            parent = blake2b(seed + parent + keys[at : at + size], digest_size=HASH_BYTES).digest()
            hashes.append(parent)
        return hashes

    def _seed(self, owner: Owner) -> bytes:
        """The owner in 32 bytes, part of every page's hash."""
        seed = self._seeds.get(owner)
        if seed is None:
            digest, tenant = owner.namespace
            adapter = b"base" if digest is None else b"adapter" + digest
            salt = b"none" if tenant is None else b"salt" + tenant.encode()
            fields = framed(_DOMAIN, adapter, salt, struct.pack("<Q", owner.begin))
            seed = hashlib.blake2b(fields, digest_size=HASH_BYTES).digest()
            if len(self._seeds) >= _MAX_SEEDS:
                self._seeds.clear()
            self._seeds[owner] = seed
        return seed


def short_hash(page: bytes) -> int:
    """A page's hash in the form that routers use: its last 64 bits."""
    return int.from_bytes(page[-8:], "big")


def framed(*fields: bytes) -> bytes:
    """Concatenates fields so that none can be confused with a part of another."""
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)
