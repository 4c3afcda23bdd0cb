"""Random traffic over every mix of families and tiers, with faulty transfers (R01, H10, H13)."""

from __future__ import annotations

import random

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, WriteBack
from manyroots.ids import AdapterDigest, AdapterName, Namespace, RequestId
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import Abort, FinishReason
from manyroots.step import AdapterLoaded, Copy, LoadAdapter
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit
from tests.helpers.seeded import seeds

LONGEST = 40


def families(rng: random.Random, page_size: int) -> list[str]:
    mixes = [
        ["full"], ["window"], ["full", "window"], ["full", "window", "wide"],
        ["recurrent"], ["full", "recurrent"], ["full", "window", "recurrent"],
    ]  # fmt: skip
    return rng.choice(mixes)


def capacity(name: str, rng: random.Random, page_size: int, max_seqs: int, host: bool) -> Capacity:
    most = LONGEST // page_size + 2
    num_host = rng.randint(4, 60) if host else 0
    if name == "recurrent":
        family = RecurrentState("recurrent", interval=rng.randint(1, 4))
        return Capacity(family, rng.randint(max_seqs + 1, max_seqs + 12), num_host)
    num_device = rng.randint(most, 90)
    if name == "full":
        return Capacity(FULL_ATTENTION, num_device, num_host)
    window = rng.randint(1, 9) if name == "window" else rng.randint(10, 24)
    return Capacity(SlidingWindow(name, window, page_size), num_device, num_host)


@pytest.mark.parametrize("seed", seeds(20))
def test_every_mix_gives_each_request_its_own_tokens(seed: int) -> None:
    """R01, H10, H13, C02, T08: prompts, aborts, unloads, failing steps and failing, late or lost
    copies over random families, tiers and policies; audited after every step."""
    run(seed)


def load(engine: SchedulerHarness, name: str, digest: AdapterDigest) -> None:
    engine.scheduler.load_adapter(AdapterName(name), AdapterSpec(digest, 8, 100), path=name)


def run(seed: int, num_requests: int = 25) -> SchedulerHarness:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    max_seqs = rng.randint(1, 5)
    has_host = rng.random() < 0.6
    bad_copies = rng.choice([0.0, 0.0, 0.2])
    slow = rng.choice([0.0, 0.5])

    def finish(copies: list[Copy]) -> list[tuple[Copy, bool]]:
        done = [copy for copy in copies if rng.random() >= slow] or copies[:1]
        return [(copy, rng.random() >= bad_copies) for copy in done]

    def finish_loads(loads: list[LoadAdapter]) -> list[AdapterLoaded]:
        done = [load for load in loads if rng.random() >= slow] or loads[:1]
        return [AdapterLoaded(load.load_id, None) for load in done]

    engine = SchedulerHarness(
        page_size=page_size,
        max_num_seqs=max_seqs,
        budget=rng.choice([6, 8, 17, 64]),
        chunk=rng.choice([None, 1, 3, 8]),
        depth=rng.choice([0, 1]),
        capacities=tuple(
            capacity(name, rng, page_size, max_seqs, has_host) for name in families(rng, page_size)
        ),
        policies=CachePolicies(
            write_back=rng.choice(list(WriteBack)),
            uses_storage=has_host and rng.random() < 0.4,
            records_events=rng.random() < 0.3,
        ),
        finish_copies=finish,
        finish_loads=finish_loads,
        max_model_len=LONGEST + 8,
        max_loras=rng.choice([0, 1, 2]),
        policy=rng.choice(["fcfs", "priority", "pack", "fair"]),
    )
    contents = {name: AdapterDigest(name.encode()) for name in "ab"}
    for name, digest in contents.items():
        load(engine, name, digest)
    heads = [[rng.randrange(50) for _ in range(rng.randint(1, 18))] for _ in range(3)]
    submitted, aborted, may_fail = {}, set(), rng.random() < 0.3
    weights: dict[int, AdapterDigest | None] = {}
    failed = False
    for number in range(num_requests):
        prompt = rng.choice(heads) + [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        request = submit(
            number,
            prompt[: LONGEST - 16],
            max_tokens=rng.randint(1, 16),
            stop_ids=tuple(rng.sample(range(50), 2)),
            salt=rng.choice([None, "a"]),
            adapter=rng.choice([None, None, "a", "b"]),
            priority=rng.randrange(3),
        )
        submitted[number] = request
        weights[number] = None if request.adapter is None else contents[request.adapter]
        engine.loop.handle(request)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.1:
            victim = rng.randrange(number + 1)
            aborted.add(victim)
            engine.loop.handle(Abort([RequestId(victim)]))
        if rng.random() < 0.1:
            engine.cache.evict_namespace(Namespace(None, rng.choice([None, "a"])))
        if rng.random() < 0.1:
            # The same name, other weights; or the same again.
            name = rng.choice("ab")
            if rng.random() < 0.5:
                engine.scheduler.unload_adapter(AdapterName(name))
            contents[name] = AdapterDigest(f"{name}{rng.randrange(3)}".encode())
            load(engine, name, contents[name])
        if may_fail and rng.random() < 0.05:
            engine.runner.fail_next = "planted"
            failed = True
    engine.run()
    for number, request in submitted.items():
        last = engine.last(number)
        want, got = expected_tokens(request, weights[number]), engine.tokens(number)
        if last.finish_reason is FinishReason.ABORT:
            assert number in aborted
            assert got == want[: len(got)]
        elif last.finish_reason is FinishReason.ERROR:
            assert failed, last.error
            assert got == want[: len(got)]
        else:
            assert got == want
    return engine
