"""Namespaces through the whole engine, with real bytes on the device, the host and in storage."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyroots.cache.events import CacheEvent, PagesRemoved, PagesStored
from manyroots.cache.keys import short_hash
from manyroots.ids import Tier
from tests.helpers.cache_harness import ints
from tests.helpers.real_engine import (
    MAX_LEN,
    PAGE,
    VOCAB,
    RealEngine,
    RealWorld,
    events_to,
    paths_of,
    stored_values,
)
from tests.unit.engine.test_kv_events import replayed

RNG = random.Random(1)
PROMPT = [RNG.randrange(3, VOCAB) for _ in range(42)]
OTHERS = [[RNG.randrange(3, VOCAB) for _ in range(90)] for _ in range(4)]
NUM_CACHED = 40


@pytest.fixture(scope="module", params=["full", "five to one", "convolutions"])
def world(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWorld]:
    world = RealWorld(tmp_path_factory.mktemp("world"), request.param)
    yield world
    world.close()


def start(world: RealWorld, folder: Path, **settings: Any) -> RealEngine:
    """Three tiers, and events."""
    (folder / "ipc").mkdir(parents=True, exist_ok=True)
    given = {
        "num_gpu_blocks_override": MAX_LEN // PAGE + 4, "num_host_pages": 400, "max_num_seqs": 2,
        "kv_storage": f"file://{folder}/kv", "kv_events_config": events_to(folder / "ipc"),
    }  # fmt: skip
    return RealEngine(world, **{**given, **settings})


def fill(engine: RealEngine) -> None:
    """Whatever else is on the device goes."""
    for other in OTHERS:
        engine.ask(other)


def tiers(engine: RealEngine, prompt: list[int], adapter: str | None) -> tuple[int, int]:
    """Pages of a prompt that can be reused, and how many of them are on the device."""
    match = engine.match(prompt, adapter)
    return match.num_pages, match.num_device_pages


def test_n08_n09_what_an_adapter_left_on_lower_tiers_comes_back_to_it_alone(
    world: RealWorld, tmp_path: Path
) -> None:
    """N08, N09, H03, S07: a request that matched nothing is written to the host and to storage; its
    pages come back from either by copies, into its own namespace, with their own numbers."""
    engine = start(world, tmp_path)
    first = engine.ask(PROMPT, "a")
    assert first.num_cached == 0
    fill(engine)
    assert tiers(engine, PROMPT, "a") == (NUM_CACHED // PAGE, 0), "nothing is on the host alone"
    for adapter in (None, "b"):
        assert engine.match(PROMPT, adapter).num_pages == 0
    engine.plans.clear()
    again = engine.ask(PROMPT, "a")
    assert (again.tokens, again.num_cached) == (first.tokens, NUM_CACHED)
    assert again.cache_use is not None
    assert again.cache_use.num_host_tokens == NUM_CACHED
    assert computed(engine) == len(PROMPT) - NUM_CACHED + len(first.tokens) - 1
    assert tiers(engine, PROMPT, "a") == (NUM_CACHED // PAGE, NUM_CACHED // PAGE)
    others = {name: engine.ask(PROMPT, name) for name in (None, "b")}
    assert [other.num_cached for other in others.values()] == [0, 0]
    assert {other.cache_use.limit for other in others.values() if other.cache_use} == {"namespace"}
    assert engine.check_units() > 3 * NUM_CACHED // PAGE
    assert engine.check_storage(stored_values(tmp_path / "kv")) > 3 * NUM_CACHED // PAGE
    engine.close()
    # Another engine has nothing but storage. Each finds what is its own there.
    engine = start(world, tmp_path)
    engine.plans.clear()
    for name, wanted in (("c", None), ("a", first), ("b", others["b"]), (None, others[None])):
        said = engine.ask(PROMPT, name)
        assert said.num_cached == (0 if wanted is None else NUM_CACHED)
        if wanted is not None:
            assert said.cache_use is not None
            assert said.cache_use.num_storage_tokens == NUM_CACHED
            assert said.tokens == wanted.tokens
        assert tiers(engine, PROMPT, name) == (NUM_CACHED // PAGE, NUM_CACHED // PAGE)
    assert engine.check_units() > 6 * NUM_CACHED // PAGE
    engine.close()


def computed(engine: RealEngine) -> int:
    """Tokens that were computed, by the plans."""
    return sum(plan.total_tokens for plan in engine.plans)


def test_n11_p06_names_outside_of_the_process_carry_the_namespace_on_every_page(
    world: RealWorld, tmp_path: Path
) -> None:
    """N11, P06: hashes, events on the wire and storage keys of base, two adapters and a tenant of
    one. One prompt is shorter than a page, one is computed in parts, and one continues after a hit.
    What storage keeps under a key has the numbers of that page."""
    engine = start(world, tmp_path, max_num_batched_tokens=8, num_gpu_blocks_override=120)
    owners = [(None, None), ("a", None), ("b", None), ("a", "tenant")]
    # The same tokens for all, so that nothing but the namespace tells pages apart.
    bias: dict[str, Any] = {"max_tokens": 9, "logit_bias": {5: 100.0}}
    said = [[*prompt, *[5] * 8] for prompt in (PROMPT[:2], PROMPT[:13], PROMPT)]
    wanted = {
        ints(*text[:end]).tobytes() for text in said for end in range(PAGE, len(text) + 1, PAGE)
    }
    by_owner: list[set[bytes]] = []
    for name, salt in owners:
        first = len(engine.events)
        for text in said:
            answer = engine.ask(text[:-8], name, salt=salt, **bias)
            assert answer.tokens == [5] * 9
        assert answer.num_cached == 12, "nothing was gone on from"
        assert {e.namespace for e in engine.events[first:]} == {engine.namespace(name, salt)}
        assert not any(isinstance(event, PagesRemoved) for event in engine.events[first:])
        for tier in (Tier.DEVICE, Tier.HOST):
            # Parents are pages that were named before, and no hash stands for two pages.
            paths = paths_of(event for event in engine.events[first:] if event.tier is tier)
            found = [b"".join(tokens for _, tokens in path) for path in paths.values()]
            assert len(found) == len(set(found))
            assert set(found) == wanted
            by_owner.append(set(paths))
    for index, (one, two) in enumerate(itertools.pairwise(by_owner)):
        assert one == two if index % 2 == 0 else not one & two, "two tiers of one, or two owners"
    assert len(set.union(*by_owner)) == len(owners) * len(wanted)
    check_wire(engine, tmp_path)
    assert engine.check_storage(stored_values(tmp_path / "kv")) >= len(owners) * len(wanted)
    engine.close()


def check_wire(engine: RealEngine, folder: Path) -> None:
    """What routers read names the adapter, its digest and the tenant with every page."""
    [cleared, *wired] = replayed(f"ipc://{folder}/ipc/r", engine.loop)
    assert cleared == {"type": "AllBlocksCleared"}
    assert len(wired) == len(engine.events)
    for told, event in zip(wired, engine.events, strict=True):
        assert told["block_hashes"] == [short_hash(page) for page in event.hashes]
        if not isinstance(event, PagesStored):
            assert told["type"] == "BlockRemoved"
            continue
        adapter, salt = event.namespace
        key = [part for part in (adapter and adapter.hex(), salt) if part is not None]
        assert told.get("extra_keys") == ([key] * len(event.hashes) if key else None)
        assert told["parent_block_hash"] == (event.parent and short_hash(event.parent))


def test_n12_n14_n16_an_unloaded_adapter_leaves_nothing_and_comes_back(
    world: RealWorld, tmp_path: Path
) -> None:
    """N12, N14, N16: pages, window pages and states on the device and the host are free at once, as
    many as before it was used, with one removal for each; used again, it stores them again."""
    # What comes back from storage is stored again as what is computed again is.
    settings = {} if world.mix == "five to one" else {"kv_storage": None}
    engine = start(world, tmp_path, num_gpu_blocks_override=120, **settings)
    base = engine.ask(PROMPT)
    before = engine.free()
    lives = []
    for _ in range(2):
        engine.events.clear()
        tokens = [engine.ask(prompt, "a").tokens for prompt in (PROMPT, [*PROMPT[:22], 7, 8, 9])]
        assert all(now < then for now, then in zip(engine.free(), before, strict=True))
        engine.check_units()
        stored = pages_of(engine.events, PagesStored)
        assert pages_of(engine.events, PagesRemoved) == Counter()
        assert set(stored.values()) == {1}
        engine.events.clear()
        reply = engine.unload("a")
        assert engine.free() == before
        assert pages_of(engine.events, PagesRemoved) == stored
        assert pages_of(engine.events, PagesStored) == Counter()
        assert reply.num_pages > 0
        lives.append((tokens, stored))
        engine.load("a")
    assert lives[0] == lives[1]
    assert {tier for tier, _ in lives[0][1]} == {Tier.DEVICE, Tier.HOST}
    again = engine.ask(PROMPT)
    assert (again.tokens, again.num_cached) == (base.tokens, NUM_CACHED)
    engine.check_units()
    engine.close()


def pages_of(events: list[CacheEvent], kind: type[CacheEvent]) -> Counter[tuple[Tier, bytes]]:
    """How often events of a kind name each page, by tier."""
    return Counter((e.tier, page) for e in events if isinstance(e, kind) for page in e.hashes)
