"""Storage keeps what requests marked (T13), through the whole engine with real bytes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from manyroots.messages import KeepRange, Retention
from manyroots.store.unit_values import unit_key
from tests.helpers.patience import PATIENCE_S
from tests.helpers.real_engine import MAX_LEN, PAGE, RealEngine, RealWorld, text
from tests.unit.store.test_backends import needs_redis
from tests.unit.store.tiers import RedisServer

NUM_PAGES = 10
FILE_BYTES = 4096
"""What a page of the tiny model takes in a folder."""
HOUR = 3600.0
MARKED, PLAIN = text(1, NUM_PAGES * PAGE + 1), text(2, NUM_PAGES * PAGE + 1)


def start(world: RealWorld, **storage: Any) -> RealEngine:
    return RealEngine(
        world, names=(), num_gpu_blocks_override=MAX_LEN // PAGE, num_host_pages=14,
        max_num_seqs=4, **storage,
    )  # fmt: skip


def keep(num_pages: int = NUM_PAGES, *, for_s: float = HOUR) -> Retention:
    return Retention((KeepRange(num_pages * PAGE, for_s=for_s),), None, 0.5)


def flood(engine: RealEngine, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 12):
        engine.ask(text(seed, NUM_PAGES * PAGE + 1), max_tokens=1)


def settle(engine: RealEngine) -> None:
    """Wait until storage has heard everything."""
    engine.run()
    engine.runner._thread.submit(int).result(PATIENCE_S)
    engine.runner.forget_stored([bytes(32)])  # waits for all that was said before


def stored_tokens(engine: RealEngine, prompt: list[int]) -> int:
    """Tokens of a prompt that an engine without any finds in storage."""
    use = engine.ask(prompt, max_tokens=1).cache_use
    assert use is not None
    return use.num_storage_tokens


def keys_of(engine: RealEngine, prompt: list[int]) -> list[bytes]:
    [*nodes] = engine.match(prompt).walk.nodes
    hashes = b"".join(node.hashes for node in nodes)[: NUM_PAGES * 32]
    return [unit_key(hashes[at : at + 32], 0, 0, 1) for at in range(0, len(hashes), 32)]


@pytest.mark.parametrize("order", ["marked when written", "marked when stored"])
def test_t13_a_marked_prefix_survives_a_flood_of_the_folder_until_its_time_is_over(
    worlds: Any, tmp_path: Path, order: str
) -> None:
    """T13: other servers find it after more was written than the folder may hold. What has no mark
    is gone, and so is the marked prefix after its time."""
    world = worlds("full")
    room = {
        "kv_storage": f"file://{tmp_path}/kv",
        "kv_storage_size": 4 * NUM_PAGES * FILE_BYTES / (1 << 30),
    }
    engine = start(world, **room)
    if order == "marked when stored":
        engine.ask(MARKED, max_tokens=1)
        settle(engine)
    engine.ask(MARKED, max_tokens=1, retention=keep())
    engine.ask(PLAIN, max_tokens=1)
    settle(engine)
    flood(engine, 100)
    settle(engine)
    assert engine.cache.marks.num_pages == NUM_PAGES
    engine.close()

    engine = start(world, **room)
    assert stored_tokens(engine, MARKED) == NUM_PAGES * PAGE
    assert stored_tokens(engine, PLAIN) == 0
    settle(engine)
    for file in (tmp_path / "kv").glob("v1/??/*"):  # an hour passes
        then = file.stat().st_mtime - HOUR
        os.utime(file, (then, then))
    flood(engine, 200)
    settle(engine)
    engine.close()

    engine = start(world, **room)
    assert stored_tokens(engine, MARKED) == 0, "the mark ends in storage, too"
    engine.close()


def test_t13_marks_beyond_a_tenants_share_end_in_storage(worlds: Any, tmp_path: Path) -> None:
    """T13: half of 40 pages, so the first mark ends when the third is set. A tenant that marks
    everything would otherwise hold all of storage."""
    engine = start(worlds("full"), kv_storage=f"file://{tmp_path}/kv")
    for seed in range(3):
        engine.ask(text(seed, NUM_PAGES * PAGE + 1), max_tokens=1, retention=keep())
        settle(engine)
    files = list((tmp_path / "kv").glob("v1/??/*"))
    kept = [file for file in files if file.stat().st_mtime > time.time() + HOUR / 2]
    assert (len(files), len(kept)) == (3 * NUM_PAGES, 2 * NUM_PAGES)
    engine.close()


@needs_redis
def test_t13_a_marked_page_lives_in_redis_as_long_as_its_mark(worlds: Any, tmp_path: Path) -> None:
    """T13: others have the time to live that the flag says."""
    import redis

    server = RedisServer(tmp_path)
    try:
        engine = start(worlds("full"), kv_storage=server.url, kv_storage_ttl_s=300)
        began = time.monotonic()
        engine.ask(MARKED, max_tokens=1, retention=keep())
        engine.ask(PLAIN, max_tokens=1)
        settle(engine)
        with redis.Redis(port=server.port) as admin:
            left = [
                [admin.pttl(b"manyroots:1:" + key) / 1000 for key in keys_of(engine, prompt)]
                for prompt in (MARKED, PLAIN)
            ]
        remaining = HOUR - (time.monotonic() - began)
        assert len(left[0]) == len(left[1]) == NUM_PAGES
        assert all(remaining <= each <= HOUR for each in left[0])
        assert all(0 < each <= 300 for each in left[1])
        engine.close()
    finally:
        server.stop()
