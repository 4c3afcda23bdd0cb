"""Pages that requests share, through the whole engine: what is published, pinned, counted and
given back. Every step is audited (`tests/helpers/real_engine.py`), and what can be found is
compared with cold numbers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from manyroots.cache.events import CacheEvent, PagesRemoved, PagesStored
from manyroots.cache.families.window import SlidingWindow
from manyroots.ids import Namespace
from manyroots.messages import FinishReason
from manyroots.step import Plan
from tests.helpers.cache_harness import resident
from tests.helpers.real_engine import (
    MAX_LEN,
    PAGE,
    RealEngine,
    RealWorld,
    events_to,
    paths_of,
    text,
)
from tests.unit.engine.test_real_slices import Steady

MIXES = ("full", "five to one", "convolutions", "latents")
NEED = MAX_LEN // PAGE
PROMPT = text(1, 42)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One of each mix of layers, of few layers, with room for a prompt of 338 tokens."""
    made: list[RealWorld] = []

    @cache
    def world(mix: str) -> RealWorld:
        changes = {"num_hidden_layers": 2} if mix == "full" else {}
        folder = tmp_path_factory.mktemp("world")
        made.append(RealWorld(folder, mix, max_position_embeddings=512, **changes))
        return made[-1]

    yield world
    for each in made:
        each.close()


def start(world: RealWorld, **settings: Any) -> RealEngine:
    given = {
        "num_gpu_blocks_override": 4 * NEED, "max_num_seqs": 4, "max_num_batched_tokens": 24,
        "names": (),
    }  # fmt: skip
    return RealEngine(world, **{**given, **settings})


def computed(plans: list[Plan]) -> int:
    return sum(plan.total_tokens for plan in plans)


def assert_balance(engine: RealEngine) -> None:
    """Free + cached + held = total, for every family on every tier."""
    for plane in engine.cache.stats().planes:
        assert plane.num_free + plane.num_cached + plane.num_held == plane.num_units, plane


def assert_nothing_is_held(engine: RealEngine) -> None:
    """Once all requests have finished and all copies have ended."""
    assert_balance(engine)
    assert [plane for plane in engine.cache.stats().planes if plane.num_held] == []


def assert_greedy(world: RealWorld, prompt: list[int], answer: list[int]) -> None:
    """Each token of an answer is the likeliest by transformers."""
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    wanted = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert answer == wanted


def test_p01_a_running_requests_full_pages_are_reused(worlds: Any) -> None:
    """P01: 338 tokens in pages of 64: a second request finds 320 while the first decodes, and both
    give the tokens of transformers."""
    engine = start(worlds("full"), block_size=64, max_model_len=448, max_num_batched_tokens=512)
    prompt = text(2, 338)
    first = engine.submit(prompt, max_tokens=40)
    while len(engine.said[first].tokens) < 3:
        engine.step()
    second = engine.submit(prompt, max_tokens=6)
    while engine.said[second].first_step is None:
        engine.step()
    assert engine.said[first].reason is None, "the first has ended before"
    engine.run()
    assert engine.said[second].num_cached == 320
    assert computed(engine.plans) == 338 + 39 + 18 + 5
    assert_greedy(engine.world, prompt, engine.said[first].tokens)
    assert engine.said[second].tokens == engine.said[first].tokens[:6]
    assert_nothing_is_held(engine)
    engine.close()


@pytest.mark.parametrize("mix", ["full", "five to one"])
def test_p03_pages_are_published_step_by_step_and_a_failed_step_publishes_nothing(
    worlds: Any, mix: str
) -> None:
    """P03: at the end of each chunk, of the prompt and of each page that decoding fills, while the
    request runs. A step that fails leaves what was found before it, and no page more."""
    engine = start(worlds(mix))
    prompt, length = text(3, 58), 20
    number = engine.submit(prompt, max_tokens=length)
    seen = []
    while engine.loop.has_work:
        engine.step()
        said = engine.said[number]
        whole = [*prompt, *said.tokens, 0]
        launched, done = computed(engine.plans), computed(engine.plans[:-1])
        found = engine.found(whole)
        # What a launched step fills can be found at once; nothing can that no step fills.
        assert min(done, len(whole) - 1) // PAGE * PAGE <= found <= launched // PAGE * PAGE
        seen.append(found)
    chunks = {24, 48, 56}
    assert set(seen) == chunks | set(range(60, len(prompt) + length, PAGE))
    assert engine.check_units() > 0
    # The second chunk of another prompt fails, after one request has begun to decode.
    other, failing = text(4, 12), text(5, 58)
    alone = engine.ask(other, max_tokens=2).tokens
    engine.plans.clear()
    number = engine.submit(failing)
    engine.step()
    engine.fail_next()
    while engine.said[number].reason is None:
        engine.step()
    assert engine.said[number].reason is FinishReason.ERROR
    assert "planted" in (engine.said[number].error or "")
    engine.run()
    assert engine.found([*failing, 0]) in (0, 24), "a page of the failed step can be found"
    assert_nothing_is_held(engine)
    engine.check_units()
    assert engine.ask([*other, 3], max_tokens=1).num_cached == 12
    again = engine.ask(failing)
    assert again.num_cached <= 24
    assert engine.ask(other, max_tokens=2).tokens == alone
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("mix", ["full", "convolutions"])
def test_p04_published_pages_are_pinned_while_a_request_uses_them(worlds: Any, mix: str) -> None:
    """P04: others evict whatever is loose, again and again, and not one page of one that runs; when
    it is over, its pages go as all others do."""
    world = worlds(mix)
    roomy = start(world)
    wanted = roomy.ask(PROMPT, max_tokens=60).tokens
    roomy.close()
    engine = start(world, num_gpu_blocks_override=NEED + 8, max_num_seqs=2)
    number = engine.submit(PROMPT, max_tokens=60)
    while not engine.said[number].tokens:
        engine.step()
    held = own_pages(engine, PROMPT)
    assert len(held) >= len(PROMPT) // PAGE
    seeds = iter(range(100, 200))
    other = None
    num_others = 0
    while engine.said[number].reason is None:
        if other is None or engine.said[other].reason is not None:
            other = engine.submit(text(next(seeds), 30), max_tokens=2)
            num_others += 1
        engine.step()
        now = own_pages(engine, PROMPT)
        assert all(now.get(key) == unit for key, unit in held.items()), "a pinned page has moved"
    engine.run()
    assert num_others > 6
    assert engine.said[number].tokens == wanted
    engine.check_units()
    while engine.found(PROMPT):
        engine.ask(text(next(seeds), 90), max_tokens=1)
    assert_nothing_is_held(engine)
    engine.close()


def own_pages(engine: RealEngine, prompt: list[int]) -> dict[Any, int]:
    """Units of a prompt's full pages in ordered planes, which a running request holds."""
    begin = b"".join(int(token).to_bytes(4, "little") for token in prompt)
    planes = engine.cache.layout.planes
    return {
        (plane, path): unit
        for (plane, path), unit in resident(engine.cache).items()
        if planes[plane].is_ordered and begin.startswith(b"".join(page for _, page in path))
    }


def test_p05_a_page_that_two_computed_is_indexed_once(worlds: Any) -> None:
    """P05: in chunks of less than a page neither can lean on the other. Both compute all of it and
    give the tokens of one alone; one copy stays, with the right numbers, and none is lost."""
    engine = start(worlds("full"), long_prefill_token_threshold=3)
    prompt = text(6, 22)
    numbers = [engine.submit(prompt, max_tokens=7) for _ in range(2)]
    engine.run()
    assert [engine.said[n].num_cached for n in numbers] == [0, 0]
    assert computed(engine.plans) == 2 * (22 + 6)
    one, two = (engine.said[n].tokens for n in numbers)
    assert one == two
    assert_greedy(engine.world, prompt, one)
    num_pages = (22 + 6) // PAGE
    assert len(resident(engine.cache)) == num_pages
    [device] = engine.cache.stats().planes
    assert (device.num_cached, device.num_held) == (num_pages, 0)
    assert device.num_free == device.num_units - num_pages
    assert engine.check_units() == num_pages
    assert engine.ask(prompt, max_tokens=7).tokens == one
    engine.close()


@pytest.mark.parametrize(
    ("mix", "is_windows_choice"),
    [("full", True), ("five to one", True), ("five to one", False), ("convolutions", True)],
)
def test_p08_each_family_says_whether_its_pages_are_shared_within_a_step(
    worlds: Any, mix: str, is_windows_choice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P08: two requests with one beginning come together. Where every family shares within a step
    the second computes its end alone; where a window was told not to, it computes all of it. With
    states it waits for the one that the first saves (P12). Each gives what transformers do."""
    monkeypatch.setattr(SlidingWindow, "shares_within_step", is_windows_choice)
    engine = start(worlds(mix), max_num_batched_tokens=160, max_num_seqs=2)
    prompts = [[*PROMPT[:40], 7, 8], [*PROMPT[:40], 9, 8]]
    numbers = [engine.submit(prompt, max_tokens=3) for prompt in prompts]
    engine.run()
    is_shared = {"full": True, "five to one": is_windows_choice, "convolutions": False}[mix]
    assert (engine.plans[0].num_tokens.tolist() == [42, 2]) == is_shared
    is_found = is_shared or mix == "convolutions"
    assert (engine.said[numbers[1]].num_cached == 40) == is_found
    for number, prompt in zip(numbers, prompts, strict=True):
        assert_greedy(engine.world, prompt, engine.said[number].tokens)
    engine.check_units()
    assert_nothing_is_held(engine)
    engine.close()


@pytest.mark.parametrize("mix", MIXES)
def test_n03_n06_an_adapters_pages_are_its_own_and_cost_what_the_bases_do(
    worlds: Any, mix: str
) -> None:
    """N03, N06: a prompt of three chunks and an answer of several pages, for base and an adapter.
    The adapter finds all of it afterwards and the base nothing; both took as much of every plane
    and found as much."""
    engine = start(worlds(mix), names=("a", "b"), max_num_batched_tokens=16, num_host_pages=400)
    # The same tokens for all, so that nothing but the namespace tells pages apart.
    bias: dict[str, Any] = {"max_tokens": 15, "logit_bias": {5: 100.0}}
    talk = [*PROMPT, *[5] * 14]
    taken, found = [], []
    for name in ("a", None):
        for other in ("b", *([None] if name else [])):
            assert engine.found([*talk, 5], other) == 0
        before = engine.free()
        engine.plans.clear()
        said = engine.ask(PROMPT, name, **bias)
        assert said.tokens == [5] * 15
        assert len([plan for plan in engine.plans if plan.total_tokens > 1]) >= 3
        taken.append([now - then for now, then in zip(engine.free(), before, strict=True)])
        more = engine.ask([*talk, 6, 7], name, max_tokens=1)
        found.append((said.num_cached, more.num_cached))
    assert taken[0] == taken[1]
    assert any(taken[0])
    assert found == [(0, len(talk) // PAGE * PAGE)] * 2
    assert engine.ask([*talk, 6, 7], "b", max_tokens=1).num_cached == 0
    assert engine.check_units() > 0
    assert_nothing_is_held(engine)
    engine.close()


@pytest.mark.parametrize("mix", MIXES)
def test_n15_n18_only_pages_of_a_namespace_are_evicted_and_only_once(worlds: Any, mix: str) -> None:
    """N15, N18: under pressure an adapter loses its pages and stays as it is. Evicting its pages
    once more, or pages that do not exist, changes nothing, beside a request that runs."""
    engine = start(worlds(mix), names=("a",), num_gpu_blocks_override=NEED + 4)
    first = engine.ask(PROMPT, "a")
    assert engine.found(PROMPT, "a") == 40
    for seed in range(10, 14):
        engine.ask(text(seed, 90), max_tokens=1)
    assert engine.found(PROMPT, "a") == 0, "nothing was evicted"
    again = engine.ask(PROMPT, "a")
    assert (again.tokens, again.num_cached) == (first.tokens, 0)
    assert engine.ask(PROMPT, "a").num_cached == 40
    busy = engine.submit(text(20, 20), max_tokens=20)
    while len(engine.said[busy].tokens) < 2:
        engine.step()
    assert any(engine.cache.evict_namespace(engine.namespace("a")).num_freed)
    before = (engine.free(), resident(engine.cache))
    for namespace in (
        engine.namespace("a"), Namespace(None, "nobody"), engine.namespace("a", "nobody")
    ):  # fmt: skip
        assert not any(engine.cache.evict_namespace(namespace).num_freed)
        assert (engine.free(), resident(engine.cache)) == before
    engine.audit()
    engine.run()
    assert_greedy(engine.world, text(20, 20), engine.said[busy].tokens)
    assert engine.ask(PROMPT, "a").tokens == first.tokens
    engine.unload("a")
    before = (engine.free(), resident(engine.cache))
    with pytest.raises(AssertionError, match="'a'"):  # the engine's reply is an error
        engine.unload("a")
    assert (engine.free(), resident(engine.cache)) == before
    assert engine.found(text(20, 20)) == 16
    engine.check_units()
    engine.close()


def described(plan: Plan) -> tuple[Any, ...]:
    """All that a plan says, to be compared."""
    arrivals = [
        (int(a.request_id), int(a.row), a.num_computed_tokens, a.adapter_slot, a.tokens.tolist(),
         [table.tolist() for table in a.page_tables])
        for a in plan.arrivals
    ]  # fmt: skip
    pages = [(p.family, p.rows.tolist(), p.places.tolist(), p.pages.tolist())
             for p in plan.new_pages]  # fmt: skip
    copies = [(c.family, c.source, c.target, c.source_units.tolist(), c.target_units.tolist())
              for c in plan.copies]  # fmt: skip
    intents = [repr(intent) for intent in plan.adapters]
    rows = (plan.rows.tolist(), plan.num_tokens.tolist(), plan.samples.tolist())
    return (*rows, arrivals, pages, copies, intents)


def mirrored(events: list[CacheEvent]) -> Counter[Any]:
    """What a consumer of the events takes to be on the device, by path."""
    paths, there = paths_of(events), Counter[bytes]()
    for event in events:
        sign = 1 if isinstance(event, PagesStored) else -1
        for page in event.hashes:
            there[page] += sign
    return Counter({paths[page]: count for page, count in there.items() if count})


def indexed(engine: RealEngine) -> Counter[Any]:
    return Counter(path for plane, path in resident(engine.cache) if plane == 0)


@pytest.mark.parametrize("mix", ["full", "convolutions"])
def test_n17_two_engines_fed_the_same_calls_make_the_same_plans(
    worlds: Any, mix: str, tmp_path: Path
) -> None:
    """N17, K02: plan by plan and victim by victim, with adapters that take turns in two slots and
    too few pages for all. On the way and at the end, stored minus removed by the events is what
    the index has."""
    runs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = start(
            worlds(mix), names=("a", "b", "c"), max_loras=2, num_gpu_blocks_override=18,
            max_model_len=64, kv_events_config=events_to(folder),
        )  # fmt: skip
        engine.loop._runner = Steady(engine)
        rng = random.Random(7)
        for _ in range(12):
            prompt = [*PROMPT[: rng.choice([0, 8, 21])], *text(rng.randrange(6), rng.randrange(30))]
            engine.submit([*prompt, 3], rng.choice([None, "a", "b", "c"]), max_tokens=9)
        while engine.loop.has_work or engine.loop.is_reading:
            engine.step()
            if engine.num_steps % 16 == 0:
                assert mirrored(engine.events) == indexed(engine)
        assert mirrored(engine.events) == indexed(engine)
        removed = [e.hashes for e in engine.events if isinstance(e, PagesRemoved)]
        plans = [described(plan) for plan in engine.plans]
        runs.append((plans, removed, {n: said.tokens for n, said in engine.said.items()}))
        assert_nothing_is_held(engine)
        engine.close()
    assert runs[0][1], "nothing was evicted"
    assert any(plan[-1] for plan in runs[0][0]), "no adapter was loaded"
    assert runs[0] == runs[1]


@pytest.mark.parametrize("mix", ["five to one", "convolutions"])
def test_h10_counts_balance_in_every_family_and_tier(worlds: Any, mix: str, tmp_path: Path) -> None:
    """H10: after every step of traffic that retracts, evicts, loads, aborts and fails, on device,
    host and in storage; at its end nothing is held."""
    engine = start(
        worlds(mix), names=("a", "b"), num_gpu_blocks_override=26, num_host_pages=60,
        max_model_len=100, kv_storage=f"file://{tmp_path}/kv",
    )  # fmt: skip
    rng = random.Random(mix)
    reasons: Counter[Any] = Counter()
    numbers: list[int] = []
    for step in range(60):
        if step in (0, 12):
            # More than there is room for, whatever the other requests find and how long copies
            # take; again after the step that fails, since it ends the first ones.
            seeds = range(40 + step, 48 + step)
            numbers += [engine.submit(text(seed, 10), max_tokens=85) for seed in seeds]
        if step % 4 == 0:
            prompt = [
                *PROMPT[: rng.choice([0, 12, 40])],
                *text(rng.randrange(4), rng.randrange(30)),
            ]
            numbers.append(engine.submit([*prompt, 3], rng.choice([None, "a", "b"]), max_tokens=24))
        if step % 20 == 7:
            engine.abort(rng.choice([n for n in numbers if engine.said[n].reason is None]))
        has_failed = FinishReason.ERROR in {engine.said[number].reason for number in numbers}
        if step % 6 == 0 and step > 0 and not has_failed:
            # Again if the only request of the step that failed was aborted.
            engine.fail_next()
        if engine.loop.has_work:
            engine.step()
        assert_balance(engine)
    while engine.loop.has_work or engine.loop.is_reading:
        engine.step()
        assert_balance(engine)
    reasons.update(engine.said[number].reason for number in numbers)
    assert reasons[FinishReason.LENGTH] > 5
    assert reasons[FinishReason.ABORT] > 0
    assert reasons[FinishReason.ERROR] > 0
    assert {plane.tier.name for plane in engine.cache.stats().planes} >= {"DEVICE", "HOST"}
    assert engine.scheduler.stats().total_retractions > 0
    assert_nothing_is_held(engine)
    engine.close()


@pytest.mark.parametrize("mix", MIXES)
def test_c03_a_request_that_does_not_fit_gives_back_what_it_has_found(
    worlds: Any, mix: str
) -> None:
    """C03: it finds a prefix and there is no room for the rest. While it waits it holds nothing;
    when there is room, it begins and gives its own tokens."""
    engine = start(worlds(mix), num_gpu_blocks_override=NEED + 2, max_num_batched_tokens=160)
    engine.ask(PROMPT[:21], max_tokens=1)
    big = engine.submit(text(8, 110), max_tokens=12)
    while not engine.said[big].tokens:
        engine.step()
    alone = [plane.num_held for plane in engine.cache.stats().planes]
    long = [*PROMPT[:20], *text(9, 80)]
    assert engine.found(long) > 0
    waiting = engine.submit(long, max_tokens=4)
    num_waits = 0
    while engine.said[big].reason is None:
        engine.step()
        if engine.said[big].reason is None and engine.scheduler.stats().num_waiting:
            num_waits += 1
            held = [plane.num_held for plane in engine.cache.stats().planes]
            # What the big one has grown by since, and what its next step writes.
            assert all(now <= then + 4 for now, then in zip(held, alone, strict=True))
    assert num_waits >= 8, "it did not wait"
    engine.run()
    assert engine.scheduler.stats().total_retractions == 0
    assert_greedy(engine.world, long, engine.said[waiting].tokens)
    assert_greedy(engine.world, text(8, 110), engine.said[big].tokens)
    assert_nothing_is_held(engine)
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("mix", MIXES)
def test_c04_each_request_is_told_its_own_reuse(worlds: Any, mix: str) -> None:
    """C04: five that begin in one step, of base and an adapter: each has the count of its own
    prefix, and the reason of its own miss; the totals are their sums."""
    engine = start(
        worlds(mix), names=("a",), max_num_batched_tokens=400, max_num_seqs=8,
        checkpoint_interval_tokens=PAGE,
    )  # fmt: skip
    engine.ask(PROMPT)
    engine.ask(text(30, 30), "a")
    before = engine.scheduler.stats()
    asked: list[tuple[list[int], str | None, int, str]] = [
        (PROMPT, None, 40, "nothing"),
        ([*PROMPT[:20], *text(31, 9)], None, 20, "cold"),
        (text(32, 9), None, 0, "cold"),
        (PROMPT, "a", 0, "namespace"),
        (text(30, 30), "a", 28, "nothing"),
    ]
    numbers = [engine.submit(prompt, name, max_tokens=2) for prompt, name, *_ in asked]
    engine.run()
    for number, (prompt, name, num_cached, limit) in zip(numbers, asked, strict=True):
        said = engine.said[number]
        assert said.cache_use is not None
        assert (said.num_cached, said.cache_use.limit) == (num_cached, limit), (prompt, name)
        if name is None:
            assert_greedy(engine.world, prompt, said.tokens)
    after = engine.scheduler.stats()
    looked_up = after.total_lookup_tokens - before.total_lookup_tokens
    assert looked_up == sum(len(prompt) for prompt, *_ in asked)
    hits = after.total_hit_tokens - before.total_hit_tokens
    assert hits == sum(num_cached for _, _, num_cached, _ in asked)
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("mix", MIXES)
def test_c07_requests_that_come_together_are_planned_as_if_one_by_one(
    worlds: Any, mix: str
) -> None:
    """C07: without pressure. What each finds, computes and shares is the same, and so are its
    tokens, whether all come before one step or each before a step of its own."""
    prompts = [[*PROMPT[: 8 * i], 30 + i, 31 + i] for i in range(5)]
    runs = []
    for at_once in (True, False):
        engine = start(worlds(mix), max_num_batched_tokens=400, max_num_seqs=8,
                       checkpoint_interval_tokens=PAGE)  # fmt: skip
        engine.ask(PROMPT)
        engine.plans.clear()
        numbers = []
        for prompt in prompts:
            numbers.append(engine.submit(prompt, max_tokens=9))
            if not at_once:
                engine.step()
        engine.run()
        begun: dict[int, Any] = {}
        for plan in engine.plans:
            tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
            for a in plan.arrivals:
                num_shared = a.num_computed_tokens // PAGE
                tables = [table.tolist()[:num_shared] for table in a.page_tables[:1]]
                begun[int(a.request_id)] = (a.num_computed_tokens, tokens[int(a.row)], tables)
        assert len(engine.plans[0].arrivals) == (5 if at_once else 1)
        said = [engine.said[n] for n in numbers]
        runs.append(([begun[n] for n in numbers], [(s.tokens, s.num_cached) for s in said]))
        engine.check_units()
        assert_nothing_is_held(engine)
        engine.close()
    assert runs[0] == runs[1]
    assert [each[0] for each in runs[0][0]] == [0, 8, 16, 24, 32]
