"""Copies between tiers through the whole engine, with real bytes: late, failing and side by side.

Every step is audited (`tests/helpers/real_engine.py`), and what can be found is compared with cold
numbers.
"""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyroots.ids import Tier
from manyroots.messages import CacheUse
from manyroots.step import Copy
from manyroots.store.host_link import HostErrand, HostLink
from tests.helpers.cache_harness import resident
from tests.helpers.patience import PATIENCE_S
from tests.helpers.real_engine import MAX_LEN, PAGE, RealEngine, RealWorld, text
from tests.unit.models.tiny import load_tiny

NEED = MAX_LEN // PAGE
SERVED = (
    "full", "five to one", "convolutions", "latents", "latents and a shared index",
    "compressed groups",
)  # fmt: skip


PROMPT = text(1, 42)


def start(world: RealWorld, **settings: Any) -> RealEngine:
    given = {
        "num_gpu_blocks_override": NEED, "num_host_pages": 300, "max_num_seqs": 4, "names": (),
        "max_num_batched_tokens": 24,
    }  # fmt: skip
    return RealEngine(world, **{**given, **settings})


def on_host(engine: RealEngine, prompt: list[int]) -> list[int]:
    """By family, how many units of a prompt can be found on the host."""
    begin = np.array(prompt, np.int32).tobytes()
    counts = [0] * len(engine.cache.layout.host)
    for plane, path in resident(engine.cache):
        if plane >= len(counts) and begin.startswith(b"".join(page for _, page in path)):
            counts[plane - len(counts)] += 1
    return counts


class HeldBack:
    """The ends of copies that a test wants to be told of later. Their bytes are there."""

    def __init__(self, engine: RealEngine, is_held: Callable[[Copy], bool]) -> None:
        self._thread = engine.runner._thread
        self._link: Any = engine.runner._mover._tiers._link
        self._tell, self._start = self._link._report, self._link.start
        self._is_held = is_held
        self._ids: set[Any] = set()
        self.ends: list[Any] = []
        self.num_told = self._num_under_way = 0
        self._changed = threading.Condition()
        self._link._report, self._link.start = self._report, self._begin

    def _begin(self, copy: Copy) -> None:
        with self._changed:
            self._num_under_way += 1
        if self._is_held(copy):
            self._ids.add(copy.copy_id)
        self._start(copy)

    def _report(self, done: Any) -> None:
        if done.copy_id in self._ids:
            self.ends.append(done)
        else:
            self.num_told += 1
            self._tell(done)
        with self._changed:
            self._num_under_way -= 1
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait for all that was begun: how many steps it takes must not depend on this machine."""
        self._thread.submit(int).result(PATIENCE_S)  # All that was launched has begun.
        with self._changed:
            assert self._changed.wait_for(lambda: not self._num_under_way, PATIENCE_S)

    def hold_no_more(self) -> None:
        """Copies from now on are told of as they end."""
        self._is_held = lambda copy: False

    def release(self) -> None:
        self.hold_no_more()
        self._ids.clear()
        for done in self.ends:
            self._tell(done)


@pytest.mark.parametrize("late", [0, 1], ids=["pages late", "others late"])
@pytest.mark.parametrize("mix", ["five to one", "convolutions"])
def test_h07_pages_and_states_of_one_request_arrive_on_the_host_together(
    worlds: Any, mix: str, late: int
) -> None:
    """H07: while the copy of one family is not acknowledged, nothing of the request is found on the
    host, though the other's bytes are there; then all of it at once. Other requests go on."""
    engine = start(worlds(mix), max_num_batched_tokens=160)
    held = HeldBack(engine, lambda copy: copy.family == late and copy.target is Tier.HOST)
    busy = engine.submit(text(9, 4), max_tokens=60)
    answered = engine.submit(PROMPT, max_tokens=1)
    while not held.ends or not held.num_told:
        assert engine.said[busy].reason is None, "no copy ended while it ran"
        engine.step()
        held.settle()
    for _ in range(5):
        engine.step()
    assert engine.said[answered].reason is not None
    assert on_host(engine, PROMPT) == [0, 0]
    held.release()
    seen = set()
    while engine.loop.has_work:
        engine.step()
        seen.add(tuple(on_host(engine, PROMPT)))
    assert max(seen) == tuple(on_host(engine, PROMPT))
    assert min(max(seen)) > 0
    assert all(each == max(seen) or each == (0, 0) for each in seen), f"in parts: {seen}"
    engine.check_units()
    engine.close()


def test_h07_what_arrived_on_the_host_last_is_not_the_first_to_go(worlds: Any) -> None:
    """H07: the older prompt's copy is acknowledged later than the newer one's; when the host is
    full, the newer one's pages go."""
    engine = start(worlds("full"), max_model_len=64, num_host_pages=34, max_num_batched_tokens=160)
    one, two, three = (text(seed, 33) for seed in (1, 2, 3))
    held = HeldBack(engine, lambda copy: len(copy.target_units) == 8)
    engine.submit(one, max_tokens=2)
    busy = engine.submit(text(4, 3), max_tokens=60)
    while not held.ends:
        assert engine.said[busy].reason is None, "no copy ended while it ran"
        engine.step()
        held.settle()
    held.hold_no_more()
    engine.submit(two, max_tokens=2)
    while on_host(engine, two) != [8]:
        assert engine.said[busy].reason is None, "no copy ended while it ran"
        engine.step()
        held.settle()
    engine.abort(busy)
    engine.step()
    assert on_host(engine, one) == [0]
    held.release()
    engine.run()
    assert (on_host(engine, one), on_host(engine, two)) == ([8], [8])
    for seed in itertools.count(10):  # until the host has no room for the next
        [_, host] = engine.cache.stats().planes
        if host.num_free < 8:
            break
        engine.ask(text(seed, 33), max_tokens=2)
    engine.ask(three, max_tokens=2)
    assert on_host(engine, one) == on_host(engine, three) == [8]
    assert on_host(engine, two)[0] < 8
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("mix", SERVED)
def test_h11_a_failed_write_back_leaves_nothing_on_the_host_and_frees_both_ends(
    worlds: Any, mix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H11: answers and the device's pages are as they were; once the host can be written to again,
    it is."""
    engine = start(worlds(mix))
    real, is_broken = HostLink._parts, [True]

    def parts(self: HostLink, errand: HostErrand) -> Iterator[list[tuple[Copy, slice]]]:
        for group in real(self, errand):
            if is_broken[0] and errand.copies[0].target is Tier.HOST:
                for copy, _ in group:  # some of it was written when it failed
                    _, target = self._ends(copy)
                    target.data[copy.target_units.tolist()] = 7
                raise OSError("planted")
            yield group

    monkeypatch.setattr(HostLink, "_parts", parts)
    cold = engine.ask(PROMPT)
    planes = engine.cache.stats().planes
    host = [plane for plane in planes if plane.tier is Tier.HOST]
    assert [plane.num_free for plane in host] == [plane.num_units for plane in host]
    assert all(plane.num_held == 0 for plane in planes)
    assert engine.cache.stats().total_failed_units > 0
    assert (engine.ask(PROMPT).tokens, engine.found(PROMPT)) == (cold.tokens, 40)
    engine.check_units()
    is_broken[0] = False
    other = text(2, 42)
    engine.ask(other)
    assert on_host(engine, other)[0] == 10
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("write_back", ["through", "eviction"])
def test_c01_with_the_host_full_no_request_takes_anothers_hit(worlds: Any, write_back: str) -> None:
    """C01: three requests come at once whose prefixes are on a full host, used there longest ago;
    making room for one costs no other its hit, and each is loaded, not computed."""
    engine = start(
        worlds("full"), max_model_len=64, num_gpu_blocks_override=32, num_host_pages=56,
        write_back=write_back, max_num_batched_tokens=160,
    )  # fmt: skip
    prompts = [text(seed, 33) for seed in range(3)]
    cold = [engine.ask(prompt, max_tokens=2).tokens for prompt in prompts]
    seed = 10
    while True:
        hosts = [plane for plane in engine.cache.stats().planes if plane.tier is Tier.HOST]
        if hosts[0].num_free == 0:
            break
        engine.ask(text(seed, 33 if hosts[0].num_free >= 8 else 5), max_tokens=2)
        seed += 1
    matches = [engine.match(prompt) for prompt in prompts]
    assert [match.num_device_pages for match in matches] == [0, 0, 0]
    wanted = [match.num_pages * PAGE for match in matches]
    assert min(wanted) >= 24
    engine.plans.clear()
    numbers = [engine.submit(prompt, max_tokens=2) for prompt in prompts]
    engine.run()
    for number, tokens, num_found in zip(numbers, cold, wanted, strict=True):
        said = engine.said[number]
        assert (said.tokens, said.num_cached) == (tokens, num_found)
        assert said.cache_use is not None
        assert said.cache_use.num_host_tokens == num_found
    assert sum(plan.total_tokens for plan in engine.plans) == 3 * (33 + 1) - sum(wanted)
    engine.check_units()
    engine.close()


def test_s07_a_prefix_that_is_quicker_to_compute_than_to_load_is_computed_and_that_is_said(
    worlds: Any,
) -> None:
    """S07: of a host that is too slow, the tier is named; once it is quick, nothing is missing."""
    engine = start(worlds("full"))
    cold = engine.ask(PROMPT)
    engine.ask(text(2, MAX_LEN - 5))
    costs: Any = engine.cache.costs
    costs.is_worth_loading = lambda *_: False
    assert engine.match(PROMPT).num_device_pages == 0
    slow = engine.ask(PROMPT)
    assert (slow.tokens, slow.num_cached, slow.cache_use) == (
        cold.tokens, 0, CacheUse(0, 0, "tier"),
    )  # fmt: skip
    engine.ask(text(2, MAX_LEN - 5))
    costs.is_worth_loading = lambda *_: True
    quick = engine.ask(PROMPT)
    assert (quick.tokens, quick.cache_use) == (cold.tokens, CacheUse(40, 0, "nothing"))
    engine.close()


@pytest.mark.parametrize("mix", SERVED)
def test_c02_what_is_computed_is_what_was_planned_under_host_pressure(
    worlds: Any, mix: str
) -> None:
    """C02: random prompts that share and part, more than device and host hold; no step computes
    more than the budget, and the model is given exactly as many tokens as were planned."""
    budget, rng = 24, random.Random(mix)
    engine = start(worlds(mix), num_host_pages=45, max_num_batched_tokens=budget)
    decoder = engine.runner._decoder
    hidden, given = decoder.hidden, []

    def counted(tokens: Any, *rest: Any) -> Any:
        given.append(len(tokens))
        return hidden(tokens, *rest)

    decoder.hidden = counted
    heads = [text(seed, rng.choice([12, 22, 33])) for seed in range(6)]
    engine.plans.clear()
    for _ in range(20):
        prompt = rng.choice(heads)[: rng.randint(5, 33)] + text(
            rng.randrange(4), rng.randint(1, 30)
        )
        engine.submit(prompt, max_tokens=rng.choice([1, 3, 9]))
        for _ in range(rng.randrange(4)):
            if engine.loop.has_work:
                engine.step()
                engine.finish_copies()
    while engine.loop.has_work:
        engine.step()
        engine.finish_copies()
    planned = [plan.total_tokens for plan in engine.plans if len(plan.rows)]
    assert given == planned
    assert max(planned) <= budget
    stats = engine.loop.stats()
    assert stats.total_host_hit_tokens > 0
    assert all(plane.num_held == 0 for plane in engine.cache.stats().planes)
    assert all(said.error is None for said in engine.said.values())
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("mix", ["full", "five to one", "latents"])
def test_t04_a_burst_larger_than_host_memory_finds_all_that_files_have(
    worlds: Any, tmp_path: Path, mix: str
) -> None:
    """T04: 16 prompts of 10 pages at once through 16 host pages, by a new engine: everything but
    the last token of each comes from files, and answers are those of an engine without a cache."""
    world = worlds(mix)
    prompts = [text(100 + number, 10 * PAGE + 1) for number in range(16)]
    storage = f"file://{tmp_path}/kv"
    sizes = {"max_model_len": 64, "num_gpu_blocks_override": 300, "max_num_seqs": 16}
    plain = start(world, **{**sizes, "num_host_pages": None, "enable_prefix_caching": False})
    numbers = [plain.submit(prompt) for prompt in prompts]
    plain.run()
    cold = [plain.said[number].tokens for number in numbers]
    plain.close()
    old = start(world, **sizes, kv_storage=storage)
    for prompt in prompts:
        old.submit(prompt)
    old.run()
    old.finish_copies()  # to files: closing does not wait for long
    old.close()
    engine = start(world, **{**sizes, "num_host_pages": 16}, kv_storage=storage)
    numbers = [engine.submit(prompt) for prompt in prompts]
    engine.run()
    assert [engine.said[number].tokens for number in numbers] == cold
    assert [engine.said[number].num_cached for number in numbers] == [10 * PAGE] * 16
    assert sum(u.num_storage_tokens for n in numbers if (u := engine.said[n].cache_use)) == 640
    assert all(plane.num_held == 0 for plane in engine.cache.stats().planes)
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("mix", ["convolutions", "delta nets", "mamba"])
def test_t06_states_come_back_where_the_host_has_fewer_units_than_the_prompt_has_pages(
    worlds: Any, tmp_path: Path, mix: str
) -> None:
    """T06, T07, F05: new engines whose host holds 5 states find all that another has written to
    files of a prompt of 30 pages. The second prompt parts from it 9 pages after its last state,
    which the fourth question for states reaches. Tokens are those of an engine without a cache."""
    world = worlds(mix)
    families = load_tiny(world.model).families
    state_bytes = sum(f.unit_bytes(PAGE, torch.float32) for f in families if f.is_state)
    page_bytes = sum(f.unit_bytes(PAGE, torch.float32) for f in families if not f.is_state)
    head = text(7, 30 * PAGE)
    prompts = {30: [*head, 5], 16: [*head[: 25 * PAGE], *text(8, 9)]}
    sizes = {
        "num_gpu_blocks_override": 80, "max_num_seqs": 2,
        "checkpoint_interval_tokens": 16 * PAGE, "checkpoint_memory_bytes": 8 * state_bytes,
    }  # fmt: skip
    half = (40 * page_bytes + 5 * state_bytes) / 2**30
    old = start(world, **sizes, kv_storage=f"file://{tmp_path}/kv")
    old.ask(prompts[30])
    old.close()
    plain = start(world, num_host_pages=None, enable_prefix_caching=False)
    for num_pages, prompt in prompts.items():
        shutil.copytree(tmp_path / "kv", tmp_path / f"{num_pages}")
        engine = start(
            world, **sizes, num_host_pages=None, kv_offloading_size=half,
            kv_storage=f"file://{tmp_path}/{num_pages}",
        )  # fmt: skip
        assert [plane.num_units for plane in engine.cache.layout.host] == [40, 5]
        said = engine.ask(prompt)
        assert (said.tokens, said.num_cached) == (plain.ask(prompt).tokens, num_pages * PAGE)
        assert said.cache_use is not None
        assert said.cache_use.num_storage_tokens == num_pages * PAGE
        assert all(plane.num_held == 0 for plane in engine.cache.stats().planes)
        engine.check_units()
        engine.close()
    plain.close()
