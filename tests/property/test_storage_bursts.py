"""Random bursts through a host that is too small for them, audited after every step (T04).

Storage has most prompts, and answers late, in any order, in part or with errors. With every policy,
all requests end with their own tokens, none waits for ever, and nothing is held in the end.
"""

from __future__ import annotations

import random

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, Prefetch, WriteBack
from manyroots.config import Policy
from manyroots.ids import AdapterDigest, AdapterName, Namespace, RequestId, Tier
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import Abort, FinishReason, Submit
from manyroots.scheduler import fetches
from manyroots.step import Copy
from tests.helpers.cache_harness import recurrent, window
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit
from tests.helpers.seeded import Draw, seeds

PAGE = 4
LONGEST = 24 * PAGE
NUM_SEEDS = 6
MOST_STEPS = 6000


class Case:
    """One random engine, and what is sent to it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        kinds = {"full": FULL_ATTENTION, "window": window(9, PAGE), "state": recurrent(1)}
        mix = rng.choice([("full",), ("full",), ("window",), ("full", "window"), ("full", "state")])
        self.error_share = rng.choice([0.0, 0.0, 0.1, 1.0])
        self.slowness = rng.choice([0.0, 0.5, 0.9])
        num_device = rng.choice([26, 40, 120])
        self.engine = SchedulerHarness(
            capacities=tuple(Capacity(kinds[k], num_device, rng.randint(6, 24)) for k in mix),
            page_size=PAGE, max_model_len=LONGEST, max_num_seqs=rng.choice([1, 3, 12]),
            budget=rng.choice([24, 256]), depth=rng.choice([0, 1]),
            policy=rng.choice(list(Policy)).value, max_loras=rng.choice([1, 2]), max_cpu_loras=4,
            policies=CachePolicies(
                uses_storage=True, prefetch=rng.choice([Prefetch.WAIT, *Prefetch]),
                prefetch_timeout_steps=4, write_back=rng.choice(list(WriteBack)),
            ),
            finish_copies=self._finish, adapter_quantum_steps=rng.choice([2, 64]),
        )  # fmt: skip
        self.digests: dict[str | None, bytes | None] = {None: None}
        for name in "abc":
            self.digests[name] = name.encode() * 32
            spec = AdapterSpec(AdapterDigest(name.encode() * 32), 8, 100)
            self.engine.scheduler.load_adapter(AdapterName(name), spec, path=name)
        heads = [[rng.randrange(50) for _ in range(rng.randint(1, 9) * PAGE)] for _ in range(4)]
        self.prompts = [
            rng.choice(heads) + [rng.randrange(50) for _ in range(rng.randint(1, 48))]
            for _ in range(rng.randint(4, 14))
        ]
        self.sent: dict[int, Submit] = {}
        self.aborted: set[int] = set()
        self.num_failed = 0
        self.num_waited = 0
        """Steps in which any request waited in line for storage."""

    def _finish(self, copies: list[Copy]) -> list[tuple[Copy, bool]]:
        done = [copy for copy in copies if self.rng.random() >= self.slowness]
        self.rng.shuffle(done)
        return [
            (c, c.source is not Tier.STORAGE or self.rng.random() >= self.error_share) for c in done
        ]

    def send(self, number: int) -> None:
        rng = self.rng
        prompt = rng.choice(self.prompts)
        self.sent[number] = submit(
            number, prompt[: LONGEST - 12], max_tokens=rng.randint(1, 12),
            salt=rng.choice([None, None, None, "s"]),
            adapter=rng.choice([None, None, "a", "b", "c"]), priority=rng.choice([0, 0, 1]),
        )  # fmt: skip
        self.engine.loop.handle(self.sent[number])

    def step(self) -> None:
        self.engine.step()
        self.num_waited += bool(self.engine.scheduler.fetches.in_line)

    def round(self, numbers: range) -> None:
        """Send a burst, and run it to its end."""
        rng = self.rng
        for number in numbers:
            self.send(number)
            if rng.random() < 0.2:
                self.step()
        for _ in range(MOST_STEPS):
            if not self.engine.loop.has_work:
                return
            self.step()
            if rng.random() < 0.02:
                self.aborted.add(victim := rng.choice(numbers))
                self.engine.loop.handle(Abort([RequestId(victim)]))
            if rng.random() < 0.004:
                self.engine.runner.fail_next = "planted"
                self.num_failed += 1
            if rng.random() < 0.01:
                self.engine.cache.evict_namespace(Namespace(None, rng.choice([None, "s"])))
        raise AssertionError(f"not done after {MOST_STEPS} steps: {self.engine.scheduler.stats()}")

    def forget(self) -> None:
        """Device and host lose all, as in another server: storage is left."""
        for plane in self.engine.cache.layout.planes:
            pool = self.engine.cache.index.pools[plane.index]
            self.engine.cache.evictors[plane.index].evict(pool.num_cached)

    def check(self) -> None:
        for number, request in self.sent.items():
            adapter = None if request.adapter is None else str(request.adapter)
            wanted, got = (
                expected_tokens(request, self.digests[adapter]), self.engine.tokens(number),
            )  # fmt: skip
            reason = self.engine.last(number).finish_reason
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert self.num_failed if reason is FinishReason.ERROR else number in self.aborted
                assert got == wanted[: len(got)]
            else:
                assert got == wanted
        assert self.engine.cache.num_keeps == 0
        assert not self.engine.scheduler.fetches.has_any
        for plane in self.engine.cache.stats().planes:
            assert plane.num_held == 0


def run(seed: int) -> int:
    """Gives the number of steps in which any request waited in line."""
    case = Case(seed)
    for burst in range(4):
        case.round(range(100 * burst, 100 * burst + 20))
        case.forget()
    case.check()
    return case.num_waited


def test_t04_r01_random_bursts_through_a_small_host_hang_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T04, R01: with aborts, failing steps, evicted tenants, adapters in turns, priorities."""
    num_waited = 0
    for seed in seeds(NUM_SEEDS):
        if seed % 2:
            monkeypatch.setattr(fetches, "MOST_STALLED_STEPS", 2)
        else:
            monkeypatch.undo()
        try:
            num_waited += run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert num_waited > 200 or Draw.only_seed is not None, "no request waited in line"
