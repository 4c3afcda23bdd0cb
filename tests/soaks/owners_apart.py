"""Random pairs of owners with the same tokens: neither finds anything of the other, on any tier.

    python -m tests.soaks.owners_apart [--pairs 10000] [--seed 1]

Owners are adapters' digests, salts and where an adapter begins, made to be mistaken for each other:
a digest with one bit changed, a salt that is a digest's bytes or another's beginning, none and the
empty one. Device and host: a cache driven by hand, whose memory tells whose a page is. Storage:
real bytes through the links, device to host to files and back, under the hashes of the pages.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import Owner, PageHasher, PrefixKey
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.ids import AdapterDigest, Namespace, Tier
from manyroots.store.backends.files import Files
from manyroots.store.host_arena import HostArena
from manyroots.store.storage_link import UnitStorage
from manyroots.store.tier_copies import TierCopies
from tests.helpers.cache_harness import CacheHarness
from tests.helpers.patience import PATIENCE_S
from tests.unit.store.tiers import Arena, copy, end_of

PAGE, NUM_PAGES, BATCH = 4, 3, 50
TOKENS = list(range(1, PAGE * NUM_PAGES + 2))
DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
Pair = tuple[PrefixKey, PrefixKey]


def pairs(count: int, seed: int) -> Iterator[Pair]:
    """Different owners, the second often made from the first."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        one = _owner(rng)
        other = _alike(rng, one) if rng.random() < 0.7 else _owner(rng)
        keys = _key(*one), _key(*other)
        if keys[0] != keys[1]:
            made += 1
            yield keys


Parts = tuple[bytes | None, str | None, int]
"""An adapter's digest, a salt, and how many tokens are the base model's."""


def _owner(rng: random.Random) -> Parts:
    digest = rng.choice([None, rng.randbytes(32)])
    salt = rng.choice([None, "", "a", rng.randbytes(rng.randint(1, 8)).hex()])
    return digest, salt, rng.choice([0, 0, 1, 4, 6]) if digest else 0


def _alike(rng: random.Random, parts: Parts) -> Parts:
    digest, salt, begin = parts
    kind = rng.randrange(5)
    if kind == 0 and digest is not None:
        place = rng.randrange(256)
        changed = bytearray(digest)
        changed[place // 8] ^= 1 << place % 8
        return bytes(changed), salt, begin
    if kind == 1:
        return digest, {None: "", "": None}.get(salt, (salt or "") + "a"), begin
    if kind == 2 and digest is not None:
        return None, digest.hex(), 0
    if kind == 3 and digest is not None:
        return digest, salt, begin + rng.randint(1, 3)
    return digest, "none" if salt is None else None, begin


def _key(digest: bytes | None, salt: str | None, begin: int) -> PrefixKey:
    if digest is None:
        return PrefixKey(Namespace(None, salt))
    adapter = Namespace(AdapterDigest(digest), salt)
    if begin == 0:
        return PrefixKey(adapter)
    return PrefixKey.activated(Namespace(None, salt), adapter, begin, PAGE)


def _batches(wanted: Iterator[Pair]) -> Iterator[list[Pair]]:
    while batch := list(islice(wanted, BATCH)):
        yield batch


def shared_pages(one: PrefixKey, other: PrefixKey) -> int:
    """How many of the first pages have the same owner: what a base model computed for both."""
    count = 0
    while count < NUM_PAGES and one.at(count) == other.at(count):
        count += 1
    return count


def check_index(wanted: Iterator[Pair]) -> None:
    """Device and host: what one has, the other finds only as far as the owner is the same."""
    for batch in _batches(wanted):
        hand = CacheHarness(
            Capacity(FULL_ATTENTION, 12, 1000), page_size=PAGE, policies=CachePolicies()
        )
        for one, other in batch:
            shared = shared_pages(one, other)
            before = hand.found(other, TOKENS)
            hand.serve(one, TOKENS)
            hand.settle()
            found = hand.found(other, TOKENS) // PAGE
            assert found <= max(before // PAGE, shared), f"{other} finds pages of {one}"
            assert hand.found(one, TOKENS) // PAGE == NUM_PAGES, "its own pages are not found"


def check_storage(wanted: Iterator[Pair], folder: Path) -> int:
    """Bytes: each owner gets its own back, and an owner that stored nothing gets nothing. Gives how
    many pages came back."""
    hasher = PageHasher(b"model", PAGE * 4)
    arena, rng = Arena(BATCH * NUM_PAGES), np.random.default_rng(0)
    host = HostArena(BATCH * NUM_PAGES, arena.data)
    backend = Files(folder, None)
    copies = TierCopies([arena], [host], UnitStorage(backend, PATIENCE_S))
    rows = host.data.view(len(host.data), -1).numpy().view(np.uint8)
    stored: dict[PageName, bytes] = {}
    """By whose a page is, not by its hash: that is what is tried here."""
    number = came = 0
    for batch in _batches(wanted):
        ours = [page for one, _ in batch for page in _pages(hasher, one)]
        theirs = [page for _, other in batch for page in _pages(hasher, other)]
        units = list(range(len(ours)))
        arena.data.copy_(Arena(BATCH * NUM_PAGES, seed=int(rng.integers(1 << 30))).data)
        fresh = []
        for unit, (name, _) in enumerate(ours):
            if name not in stored:
                stored[name] = arena.bits(unit)
                fresh.append(unit)
        number += 4
        end_of(copies, copy(number, DEVICE, HOST, units, units))
        hashes = tuple(ours[unit][1] for unit in fresh)
        end_of(copies, copy(number + 1, HOST, STORAGE, fresh, [], hashes))
        for pages, step in ((theirs, 2), (ours, 3)):
            rows[:] = 0
            fetch = copy(
                number + step, STORAGE, HOST, [], units, tuple(page_hash for _, page_hash in pages)
            )
            arrived = end_of(copies, fetch)[number + step].arrived
            for unit, (name, _) in enumerate(pages):
                assert arrived[unit] == (name in stored), "found what nobody stored, or lost it"
                if arrived[unit]:
                    assert rows[unit].tobytes() == stored[name], "another owner's bytes"
                    came += 1
    copies.close()
    return came


PageName = tuple[Owner, ...]
"""The owner of a page and of each before it; tokens are everywhere the same."""


def _pages(hasher: PageHasher, key: PrefixKey) -> list[tuple[PageName, bytes]]:
    """Each page's name and hash."""
    tokens = np.array(TOKENS, np.int32)
    parent, found = hasher.root, []
    owners = [key.at(page) for page in range(NUM_PAGES)]
    for page, owner in enumerate(owners):
        keys = tokens[page * PAGE : (page + 1) * PAGE].tobytes()
        [parent] = hasher.chain(parent, owner, keys)
        found.append((tuple(owners[: page + 1]), parent))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    check_index(pairs(arguments.pairs, arguments.seed))
    with tempfile.TemporaryDirectory() as folder:
        came = check_storage(pairs(arguments.pairs, arguments.seed), Path(folder))
    print(
        f"{arguments.pairs} pairs of owners stay apart on device, host and in files; "
        f"{came} pages came back to their own"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
