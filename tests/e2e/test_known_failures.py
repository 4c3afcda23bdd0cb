"""What has gone wrong with adapters in other engines, one test each.

The whole engine in one process (directory, scheduler, cache, loader, runner, real files) around a
tiny model; every step is audited, and every plan is checked by `tests/helpers/adapter_engine.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from manyroots.cache.events import PagesRemoved, PagesStored
from manyroots.ids import AdapterName
from manyroots.messages import ErrorKind, FinishReason
from manyroots.sampling import SamplingParams
from tests.helpers.adapter_engine import MAX_LEN, PAGE_SIZE, AdapterEngine, TinyWorld
from tests.helpers.adapter_folders import Recipe

CONTENTS = {name: Recipe(rank=4, seed=seed) for seed, name in enumerate("abcd", start=1)}
NAMES = {name: name for name in CONTENTS}
PROMPT = list(range(20, 37))
NUM_CACHED = 16
"""What a request for the prompt finds of an equal one: every full page."""
LONG = SamplingParams(max_tokens=MAX_LEN - len(PROMPT), temperature=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"), CONTENTS)


@pytest.fixture
def engine(world: TinyWorld) -> Iterator[AdapterEngine]:
    engine = AdapterEngine(world, names=NAMES)
    yield engine
    engine.close()


def alone(world: TinyWorld, content: str | None, sampling: SamplingParams = LONG) -> list[int]:
    """What a fresh engine gives for the prompt."""
    engine = AdapterEngine(world, names=NAMES)
    engine.submit(1, PROMPT, content, sampling=sampling)
    engine.run()
    engine.close()
    return engine.tokens(1)


def test_a_name_loaded_again_with_other_weights_finds_no_stale_pages(
    engine: AdapterEngine, world: TinyWorld
) -> None:
    """N20: in place, and after unloading; also when the first content comes back."""
    wanted = {name: alone(world, name)[:8] for name in "ab"}
    assert wanted["a"] != wanted["b"]
    assert engine.answer(1, PROMPT, "a") == wanted["a"]
    engine.load("a", "b", in_place=True)
    engine.run()
    assert engine.answer(2, PROMPT, "a") == wanted["b"]
    assert engine.cached(2) == 0
    engine.unload("a")
    engine.load("a", "a")
    engine.run()
    assert engine.answer(3, PROMPT, "a") == wanted["a"]
    assert engine.cached(3) == 0
    assert engine.answer(4, PROMPT, "a") == wanted["a"]
    assert engine.cached(4) == NUM_CACHED


def test_an_adapter_named_like_a_salt_shares_nothing_with_it(
    engine: AdapterEngine, world: TinyWorld
) -> None:
    """N01, N04, N21: base with salt "a", adapter "a" without, adapter "a" with salt "a"."""
    cases = [(None, "a"), ("a", None), ("a", "a"), ("b", "a"), (None, None)]
    for number, (adapter, salt) in enumerate(cases):
        engine.submit(number, PROMPT, adapter, salt=salt)
        engine.run()
        assert engine.cached(number) == 0, (adapter, salt)
        assert engine.tokens(number) == alone(world, adapter)[:8]
    for number, (adapter, salt) in enumerate(cases, start=10):
        engine.submit(number, PROMPT, adapter, salt=salt)
        engine.run()
        assert engine.cached(number) == NUM_CACHED, (adapter, salt)


def test_event_and_storage_keys_of_every_page_carry_the_adapter(world: TinyWorld) -> None:
    """N11, N14: also where the prompt is shorter than a page; storage uses the same hashes. What
    was stored is removed, page by page, when the adapter goes."""
    engine = AdapterEngine(world, names=NAMES, records_events=True, max_loras=0)
    hashes: dict[str | None, set[bytes]] = {}
    number = itertools.count()
    for adapter in (None, "a", "b"):
        for prompt in (PROMPT, PROMPT[:2]):
            # The same tokens for all, so that nothing but the namespace tells pages apart.
            bias = SamplingParams(max_tokens=9, temperature=0, logit_bias={5: 100.0})
            engine.submit(next(number), prompt, adapter, sampling=bias)
            engine.run()
        events = engine.cache.take_events()
        stored = [event for event in events if isinstance(event, PagesStored)]
        assert len(stored) == len(events)
        assert {event.namespace.adapter is None for event in stored} == {adapter is None}
        hashes[adapter] = {page for event in stored for page in event.hashes}
        num_pages = (len(PROMPT) + 8) // PAGE_SIZE + (2 + 8) // PAGE_SIZE
        assert len(hashes[adapter]) == num_pages
    for one, two in itertools.combinations(hashes.values(), 2):
        assert not one & two
    engine.unload("a")
    engine.run()
    removed = engine.cache.take_events()
    assert all(isinstance(event, PagesRemoved) for event in removed)
    assert {page for event in removed for page in event.hashes} == hashes["a"]
    assert sum(len(event.hashes) for event in removed) == len(hashes["a"])
    engine.close()


def test_no_slot_is_rotated_under_a_running_request(
    engine: AdapterEngine, world: TinyWorld
) -> None:
    """W03, W09: others come and go through the second slot while one runs on in the first."""
    number = itertools.count()
    running: list[int] = []
    num_evictions = 0
    while num_evictions < 6:
        assert len(running) < 100, "the others don't get their turn"
        running.append(next(number))
        engine.submit(running[-1], PROMPT, "a", sampling=LONG)
        for adapter in "bcd":
            engine.submit(next(number), PROMPT[:3], adapter, sampling=SamplingParams(max_tokens=1))
        # The next one of `a` comes before this one is over: the slot is in use all the time.
        while len(engine.tokens(running[-1])) < 20:
            engine.step()
            engine.finish_loads()
        stats = engine.loop.stats().adapters
        assert stats is not None
        num_evictions = stats.total_device_evictions
    engine.run()
    wanted = alone(world, "a")
    assert all(engine.tokens(request) == wanted for request in running)


def test_an_unload_frees_everything_without_another_call(engine: AdapterEngine) -> None:
    """N12, N13, W08: pages without a holder go at once, the rest when the running request ends."""
    num_free = engine.loop.stats().num_free_pages
    engine.submit(1, PROMPT, "a")
    engine.submit(2, PROMPT[:6], "a")
    engine.run()
    assert engine.loop.stats().num_free_pages < num_free
    engine.submit(3, PROMPT, "a", sampling=LONG)
    while not engine.tokens(3):
        engine.step()
    op_id = engine.unload("a")
    engine.step()
    assert engine.replies[op_id].num_requests == 1
    stats = engine.loop.stats()
    assert stats.num_cached_pages == 0
    assert stats.num_free_pages + stats.num_held_pages == stats.num_pages
    for name in "bcd":
        engine.unload(name)
    engine.run()
    assert engine.last(3) is not None
    assert engine.loop.stats().num_free_pages == num_free
    engine.assert_nothing_of_adapters_is_left()


@pytest.mark.parametrize("num_aborted", [0, 1, 4])
def test_an_unload_after_many_choices_of_one_prompt_does_not_hang(
    world: TinyWorld, num_aborted: int
) -> None:
    """W04: n = 4, some given up by their caller, unloaded while they run and after they ran."""
    engine = AdapterEngine(world, names=NAMES, num_pages=18)
    for begin in (0, 10):
        sampling = [SamplingParams(max_tokens=16, seed=seed) for seed in range(4)]
        for number, params in enumerate(sampling, start=begin):
            engine.submit(number, PROMPT, "a", sampling=params)
        while not engine.tokens(begin):
            engine.step()
        engine.abort(*range(begin, begin + num_aborted))
        if begin == 0:
            engine.run()
        engine.unload("a")
        engine.run(max_steps=500)
        for number in range(begin, begin + 4):
            last = engine.last(number)
            assert last is not None
            is_aborted = number < begin + num_aborted
            reason = FinishReason.ABORT if is_aborted else FinishReason.LENGTH
            assert last.finish_reason is reason
        engine.load("a", "a")
        engine.run()
    for name in "abcd":
        engine.unload(name)
    engine.run()
    engine.assert_nothing_of_adapters_is_left()
    engine.close()


def test_the_cap_counts_adapters_whose_prompts_are_computed_in_chunks(world: TinyWorld) -> None:
    """L01: prompts of many chunks, more adapters than the cap; every plan is checked."""
    engine = AdapterEngine(world, names=NAMES, budget=4, max_num_seqs=4, max_loras=2)
    wanted = {name: alone(world, name)[:8] for name in "abcd"}
    for number, adapter in enumerate("abcdabcd"):
        engine.submit(number, PROMPT, adapter)
    engine.run_with_quick_loads()
    for number, adapter in enumerate("abcdabcd"):
        assert engine.tokens(number) == wanted[adapter]
    assert set(engine.runner.num_adapters) == {0, 1, 2}
    engine.close()


@pytest.mark.parametrize("name", ["nobody", "A", "a ", "base", "", "a/../b"])
def test_a_wrong_name_is_refused_and_never_answered_by_the_base_model(
    engine: AdapterEngine, name: str
) -> None:
    """N19: also while others run."""
    engine.submit(1, PROMPT, "a")
    engine.submit(2, PROMPT, name)
    engine.run()
    last = engine.last(2)
    assert last is not None
    assert last.finish_reason is FinishReason.ERROR
    assert last.error_kind is ErrorKind.NOT_FOUND
    assert repr(name) in str(last.error)
    assert not engine.tokens(2)
    assert len(engine.tokens(1)) == 8


def test_a_name_that_was_unloaded_is_refused(engine: AdapterEngine) -> None:
    """N19, W04"""
    assert engine.answer(1, PROMPT, "a")
    engine.unload("a")
    assert engine.answer(2, PROMPT, "a") == []
    last = engine.last(2)
    assert last is not None
    assert last.error_kind is ErrorKind.NOT_FOUND


def test_no_salt_forges_an_adapters_namespace(world: TinyWorld) -> None:
    """N04: whatever a caller knows of the adapter: its name, its digest, how keys are written."""
    engine = AdapterEngine(world, names=NAMES, num_pages=128)
    wanted = alone(world, None)[:8]
    engine.answer(0, PROMPT, "a")
    digest = engine.residency.registry.loaded[AdapterName("a")].digest
    written = digest.decode("latin-1")
    salts = [
        "a", "", "none", "base", digest.hex(), written, f"adapter{written}",
        f"adapter{digest.hex()}", f"\0{written}", f"salt\0adapter{written}", "tenant",
    ]  # fmt: skip
    for number, salt in enumerate(salts, start=1):
        engine.submit(number, PROMPT, None, salt=salt)
        engine.run()
        assert engine.cached(number) == 0, salt
        assert engine.tokens(number) == wanted
    engine.answer(50, PROMPT, "a")
    assert engine.cached(50) == NUM_CACHED
    engine.close()


def test_an_adapter_is_read_once_however_long_it_is_used(engine: AdapterEngine) -> None:
    """W01, W10: opening it reads the files, and the first load uses what was read."""
    for number in range(6):
        engine.submit(number, PROMPT, "a", sampling=LONG)
        engine.run()
    assert engine.reads == {"a": 1}
    assert sum(engine.runner.num_adapters.values()) > 6 * len(range(len(PROMPT), MAX_LEN)) - 6
    engine.load("a", "a", in_place=True)
    engine.run()
    assert engine.reads == {"a": 2}, "loading again reads once, to see what is there now"
    engine.answer(10, PROMPT, "a")
    assert engine.reads == {"a": 2}


def test_adapters_that_take_turns_are_read_from_host_memory(engine: AdapterEngine) -> None:
    """W01: four through two slots, in every step others; the disk is read when they are opened,
    and once more at most for what was opened at the same moment."""
    for number, adapter in enumerate("abcd" * 5):
        engine.submit(number, [*PROMPT[:5], number], adapter)
    engine.run()
    reads = dict(engine.reads)
    assert set(reads) == set("abcd")
    assert max(reads.values()) <= 2
    for number, adapter in enumerate("abcd" * 5, start=100):
        engine.answer(number, [*PROMPT[:5], number - 100], adapter)
    assert engine.reads == reads
    stats = engine.loop.stats().adapters
    assert stats is not None
    assert stats.total_loads_from_host >= 16
