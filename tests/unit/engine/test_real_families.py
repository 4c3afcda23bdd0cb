"""Families of layers through the whole engine, with real bytes: what is resumed, kept and freed.

Every step is audited (`tests/helpers/real_engine.py`), and what can be found is compared with cold
numbers.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyroots.cache.keys import PrefixKey
from manyroots.cache.matching import Limit
from manyroots.cache.planes import ABSENT, Plane
from manyroots.ids import Namespace
from manyroots.messages import FinishReason
from manyroots.models import load
from manyroots.observe.metrics import Metrics
from tests.helpers.cache_harness import ints, longest, path_of, resident
from tests.helpers.real_engine import MAX_LEN, PAGE, RealEngine, RealWorld, text

BASE = PrefixKey(Namespace(None, None))
NEED = MAX_LEN // PAGE
MANY = 4 * NEED
"""Pages of more than all prompts here."""


PROMPT = text(1, 42)


def start(world: RealWorld, **settings: Any) -> RealEngine:
    given = {"num_gpu_blocks_override": MANY, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    return RealEngine(world, **{**given, **settings})


def take_out(engine: RealEngine, prompt: list[int], plane: Plane, page: int) -> None:
    """Evict a single unit; where only ends are evicted, first all units after it."""
    for each in range(len(prompt) // PAGE - 1 if plane.is_ordered else page, page - 1, -1):
        path = path_of(BASE, prompt, each + 1, PAGE)
        for node in engine.cache.index.tree.nodes():
            if node.first <= each < node.end and node.keys.startswith(path[node.first][1]):
                place = each - node.first
                if node.units[plane.index][place] != ABSENT:
                    engine.cache.index.remove(node, plane.index, ints(place).astype("intp"))
                break


def best(engine: RealEngine, prompt: list[int]) -> int:
    """The longest boundary that every family can resume from, by trying each."""
    now = resident(engine.cache)
    of = {plane.index: [plane.index] for plane in engine.cache.layout.device}
    for plane in engine.cache.layout.host:
        of[plane.family_index].append(plane.index)

    def has(plane: int, path: Any) -> bool:
        return any((each, path) in now for each in of[plane])

    return longest(engine.cache.layout, BASE, prompt, has) * PAGE


@pytest.mark.parametrize("host", [None, 300], ids=["device", "host"])
@pytest.mark.parametrize("mix", ["window", "five to one", "convolutions"])
def test_h02_with_holes_in_any_family_a_request_resumes_where_all_of_them_can(
    worlds: Any, mix: str, host: int | None
) -> None:
    """H02, P07, H08: units are taken out at random, on the device and on the host; the request
    finds the longest boundary that is left to every family, and gives its own tokens from there."""
    engine = start(worlds(mix), num_host_pages=host, checkpoint_interval_tokens=PAGE)
    rng = random.Random(f"{mix} {host}")
    cold = engine.ask(PROMPT, max_tokens=2).tokens
    assert engine.ask(PROMPT, max_tokens=2).num_cached == 40
    layout = engine.cache.layout
    found = []
    for number in range(6):
        family = number % len(layout.device)
        for page in rng.sample(range(10), rng.choice([1, 2, 4])):
            for plane in (p for p in layout.planes if p.family_index == family):
                take_out(engine, PROMPT, plane, page)
        take_out(engine, PROMPT, rng.choice(layout.planes), rng.randrange(10))
        wanted = best(engine, PROMPT)
        said = engine.ask(PROMPT, max_tokens=2)
        assert (said.tokens, said.num_cached) == (cold, wanted)
        found.append(wanted)
    assert len(set(found)) > 2, "holes made no difference"
    engine.check_units()
    engine.close()


def test_c06_with_several_windows_the_usable_prefix_is_the_smallest(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C06, S07: a model whose layers have windows of 7, 11 and 19 tokens, served; each window in
    turn has lost a page that the others do not need, or all need."""
    described = load.describe

    def several(source: Any, **more: Any) -> Any:
        spec, sizes = described(source, **more), iter([7, 11, 19, 7, 11])
        layers = []
        for layer in spec.layers:
            mixer: Any = layer.mixers[0]
            if mixer.memory.window is not None:
                mixer = replace(mixer, memory=replace(mixer.memory, window=next(sizes)))
            layers.append(replace(layer, mixers=(mixer,)))
        return replace(spec, layers=tuple(layers))

    monkeypatch.setattr(load, "describe", several)
    world = RealWorld(tmp_path, "five to one")
    engine = start(world, num_gpu_blocks_override=None, kv_cache_memory_bytes=16 << 20)
    windows = engine.cache.layout.device[1:]
    sizes = [plane.family.window for plane in windows]  # type: ignore[attr-defined]
    assert sorted(sizes) == [7, 11, 19]
    cold = engine.ask(PROMPT).tokens
    found = set()
    for plane, page in itertools.product(windows, (9, 7, 6, 5)):
        take_out(engine, PROMPT, plane, page)
        now = resident(engine.cache)
        there = [
            [(each.index, path_of(BASE, PROMPT, page + 1, PAGE)) in now for page in range(10)]
            for each in windows
        ]
        # A boundary needs the pages of every window before it; each token sees itself, too.
        usable = [
            {b for b in range(11) if all(has[max(0, b * PAGE - size + 1) // PAGE : b])}
            for has, size in zip(there, sizes, strict=True)
        ]
        wanted = max(set.intersection(*usable)) * PAGE
        said = engine.ask(PROMPT)
        assert (said.tokens, said.num_cached) == (cold, wanted)
        assert said.cache_use is not None
        assert said.cache_use.limit == ("window" if wanted < 40 else "nothing")
        found.add(wanted)
    assert len(found) > 2, "the windows made no difference"
    engine.check_units()
    engine.close()
    world.close()


@pytest.mark.parametrize("mix", ["window", "five to one"])
def test_p07_prompts_that_end_around_pages_and_windows_are_resumed_exactly(
    worlds: Any, mix: str
) -> None:
    """P07: they and what was said to them go on from their last whole page, or from what is left of
    it where windows have moved on; the numbers are cold ones."""
    engine = start(worlds(mix), num_gpu_blocks_override=NEED, names=(), max_num_batched_tokens=8)
    head, found = text(2, 50), []
    for length in (3, 4, 5, 11, 12, 13, 24):
        prompt = head[: length % 8] + head[10 : 10 + length - length % 8]
        first = engine.ask(prompt, max_tokens=9)
        for longer in (prompt, [*prompt, *first.tokens, 7]):
            wanted = best(engine, longer)
            said = engine.ask(longer, max_tokens=9)
            assert said.num_cached == wanted
            assert longer is not prompt or said.tokens == first.tokens
            found.append((len(longer) - 1) // PAGE * PAGE - wanted)
    engine.check_units()
    assert found.count(0) >= len(found) // 2
    engine.close()


@pytest.mark.parametrize(
    ("mix", "num_pages", "chunk", "count"), [("window", 12, 8, 3), ("five to one", NEED, 4, 4)]
)
def test_h04_a_page_turns_though_none_is_free_where_the_request_gives_one_back(
    worlds: Any, mix: str, num_pages: int, chunk: int, count: int
) -> None:
    """H04, P07: requests hold all pages of a window, and continue: each is credited with the page
    that its window has left. No request is retracted, and each gives what it gives alone."""
    settings = {"num_gpu_blocks_override": num_pages, "max_num_batched_tokens": chunk}
    engine = start(worlds(mix), names=(), **settings)
    window = engine.cache.layout.device[-1].index
    assert engine.cache.layout.device[window].num_units == 4 * count
    prompts = [text(seed, 4) for seed in range(count)]
    alone = [engine.ask(prompt, max_tokens=40, salt="alone").tokens for prompt in prompts]
    pool, growth = engine.cache.index.pools[window], engine.cache._growth
    extend, credited = growth.extend, []

    def watched(lease: Any, *given: Any) -> Any:
        num_free, num_pages = pool.num_available, len(lease.tables[window])
        outcome = extend(lease, *given)
        credited.append(len(lease.tables[window]) - num_pages > num_free)
        return outcome

    growth.extend = watched  # type: ignore[method-assign,assignment]
    numbers = [engine.submit(prompt, max_tokens=40) for prompt in prompts]
    engine.run()
    assert [engine.said[number].tokens for number in numbers] == alone
    assert credited.count(True) > 5
    assert engine.loop.stats().total_retractions == 0
    engine.check_units()
    engine.close()


def test_h08_a_state_goes_alone_and_pages_take_states_along(worlds: Any) -> None:
    """H08: with room for few states their pages stay, and are used as far as a state is left. With
    room for few pages no state outlives its page."""
    world = worlds("convolutions")
    prompts = [text(seed, 48) for seed in range(5)]
    engine = start(world, checkpoint_memory_bytes=0, max_num_seqs=3, names=())
    cold = [engine.ask(prompt).tokens for prompt in prompts]
    pages, states = engine.cache.stats().planes
    assert pages.num_cached >= 5 * 12, "pages went with their states"
    assert states.num_free + states.num_cached == states.num_units <= 3
    hits = []
    for prompt, tokens in zip(prompts[::-1], cold[::-1], strict=True):
        wanted = best(engine, prompt)
        said = engine.ask(prompt)
        assert (said.tokens, said.num_cached) == (tokens, wanted)
        hits.append(said)
    assert hits[0].num_cached > 0
    assert Limit.CHECKPOINT.name.lower() in {said.cache_use.limit for said in hits}  # type: ignore[union-attr]
    engine.check_units()
    engine.close()
    engine = start(
        world, num_gpu_blocks_override=NEED, checkpoint_interval_tokens=PAGE, names=(),
        checkpoint_memory_bytes=1 << 20,
    )  # fmt: skip
    for prompt, tokens in zip(prompts, cold, strict=True):
        assert engine.ask(prompt).tokens == tokens
    found = resident(engine.cache)
    pages, states = engine.cache.stats().planes
    assert 0 < states.num_cached < pages.num_cached <= NEED
    for plane, path in found:
        assert all((0, path[:end]) in found for end in range(1, len(path) + 1)), f"{plane}: a hole"
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("host", [None, 300], ids=["device", "host"])
@pytest.mark.parametrize("mix", ["full", "five to one", "convolutions"])
def test_h09_making_room_never_evicts_what_the_request_resumes_from(
    worlds: Any, mix: str, host: int | None
) -> None:
    """H09: what it found was used longest ago, and the request takes all the room there is; with a
    host, what it found is on its way to the device meanwhile."""
    settings = {"num_gpu_blocks_override": NEED, "num_host_pages": host, "names": ()}
    engine = start(worlds(mix), max_num_batched_tokens=160, **settings)
    long = [*PROMPT[:40], *text(3, MAX_LEN - 45)]
    cold = engine.ask(long, salt="cold").tokens
    for prompt in (PROMPT, text(4, 60), text(5, 50)):
        engine.ask(prompt)
    wanted = best(engine, long)
    said = engine.ask(long)
    assert (said.tokens, said.num_cached) == (cold, wanted)
    assert wanted > 0
    assert engine.found(text(4, 60)) < 56 or host, "there was room enough"
    engine.check_units()
    engine.close()


def test_h06_a_request_without_a_checkpoint_goes_on_and_says_so(worlds: Any) -> None:
    """H06, S07: with a state for each running request and none to save one in; counted, and what
    lacks it is named as the reason when the prompt comes again."""
    engine = start(worlds("convolutions"), checkpoint_memory_bytes=0, max_num_seqs=2, names=())
    prompts = [text(seed, 42) for seed in (1, 2)]
    alone = [engine.ask(prompt, salt="alone").tokens for prompt in prompts]
    before = engine.cache.stats().total_skipped_checkpoints
    numbers = [engine.submit(prompt) for prompt in prompts]
    engine.run()
    assert [engine.said[number].tokens for number in numbers] == alone
    num_skipped = engine.cache.stats().total_skipped_checkpoints
    assert num_skipped >= before + 2
    page = Metrics("tiny", engine.loop.stats).render().decode()
    assert f'manyroots:checkpoints_skipped_total{{model_name="tiny"}} {num_skipped}.0\n' in page
    states = engine.cache.stats().planes[1]
    assert states.num_held == 0
    for prompt, tokens in zip(prompts, alone, strict=True):
        wanted = best(engine, prompt)
        said = engine.ask(prompt)
        assert (said.tokens, said.num_cached) == (tokens, wanted)
        assert said.cache_use is not None
        assert (said.cache_use.limit == "checkpoint") == (wanted < 40)
    engine.check_units()
    engine.close()


@pytest.mark.parametrize("host", [None, 300], ids=["device", "host"])
def test_p10_a_publication_that_is_skipped_leaves_no_state_behind(
    worlds: Any, host: int | None
) -> None:
    """P10: the adapter is unloaded while its prompt is computed; two requests save the same state
    in one step; one is aborted between a step and its result, one in the middle of its answer; a
    step fails. Nothing is held then, and nothing that the adapter had is left."""
    engine = start(
        worlds("convolutions"), num_host_pages=host, checkpoint_interval_tokens=PAGE,
        max_num_batched_tokens=12,
    )  # fmt: skip
    whole = engine.free()
    saved = sum_of_saves(engine)
    running = engine.submit(PROMPT, "a", max_tokens=9)
    while not sum_of_saves(engine) - saved > 2:
        engine.step()
    engine.unload("a")
    engine.run()
    assert engine.said[running].reason is FinishReason.LENGTH
    assert engine.free() == whole
    twins = [engine.submit(PROMPT, "b", max_tokens=3) for _ in range(2)]
    engine.run()
    assert engine.said[twins[0]].tokens == engine.said[twins[1]].tokens
    for num_steps in (1, 2, 3, 8):
        one, other = (engine.submit(text(6, 30), "b", max_tokens=20) for _ in range(2))
        for _ in range(num_steps):
            engine.step()
        engine.abort(one)
        engine.step()
        engine.abort(other)
        engine.run()
    engine.fail_next()
    failed = engine.submit(text(7, 30), "b")
    engine.run()
    assert "planted" in str(engine.said[failed].error)
    assert all(plane.num_held == 0 for plane in engine.cache.stats().planes)
    engine.check_units()
    engine.unload("b")
    assert engine.free() == whole
    engine.close()


def sum_of_saves(engine: RealEngine) -> int:
    """States that plans have saved so far."""
    return sum(copy.is_after_model for plan in engine.plans for copy in plan.copies)


@pytest.mark.parametrize("mix", ["convolutions", "delta nets", "mamba", "mamba beside attention"])
def test_h05_however_an_answer_ends_the_next_turn_resumes_from_its_state(
    worlds: Any, mix: str
) -> None:
    """H05: by a stop token, by an abort while a step is under way, before and after a page is
    full. The next turn finds as much as after an end by length, its tokens are cold ones, and all
    that can be found has the numbers of its own tokens."""
    engine = start(worlds(mix))
    whole = engine.ask(PROMPT, max_tokens=16, salt="whole").tokens
    stops = [n for n in range(6, 16) if whole[n - 1] not in whole[: n - 1]][:2]
    assert stops, "every token comes twice"
    endings = [*itertools.product(("abort",), (6, 7, 8)), *itertools.product(("stop",), stops)]
    for ending, length in endings:
        talk, found = [*PROMPT, *whole[:length], *text(2, 3)], []
        for how in ("length", ending):
            salt = f"{how} before {ending} {length}"
            number = engine.submit(
                PROMPT,
                salt=salt,
                max_tokens=length if how == "length" else 16,
                stop_ids=(whole[length - 1],) if how == "stop" else (),
            )
            if how == "abort":
                while len(engine.said[number].tokens) < length:
                    engine.step()
                engine.abort(number)
            engine.run()
            assert engine.said[number].tokens == whole[:length]
            found.append(engine.ask(talk, salt=salt))
        assert found[1].num_cached >= found[0].num_cached > 0
        assert found[1].tokens == engine.ask(talk, salt=f"cold {salt}").tokens
    engine.check_units()
    engine.close()
