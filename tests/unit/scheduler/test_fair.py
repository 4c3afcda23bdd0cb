"""Shares between tenants with the fair policy (L08): no credit, no debt, no memory."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from manyroots.ids import AdapterDigest, AdapterName
from manyroots.lora.spec import AdapterSpec
from manyroots.scheduler.policies.fair import FairPolicy
from manyroots.step import Plan
from tests.helpers.scheduler_harness import SchedulerHarness, submit

MOST_STEPS = 10_000


class Shares:
    """An engine that notes, after every step, what each tenant was served and which tenants
    wait."""

    def __init__(self, **settings: int) -> None:
        self.engine = SchedulerHarness(
            policy="fair", num_pages=128, depth=0, reuse=False, **settings
        )  # type: ignore[arg-type]
        self.tenants: dict[int, str] = {}
        self.rows: dict[int, str] = {}
        self.served: Counter[str] = Counter()
        self.history: list[tuple[dict[str, int], set[str]]] = []
        self.keeps_history = False
        self.order: list[int] = []
        """Requests as they end."""
        self._num_steps = 0
        self._numbers = itertools.count(1)

    def ask(self, tenant: str, length: int, max_tokens: int, adapter: str | None = None) -> int:
        number = next(self._numbers)
        self.tenants[number] = tenant
        prompt = [number % 50, number // 50 % 50, number // 2500 % 50] + [0] * (length - 3)
        self.engine.loop.handle(
            submit(number, prompt, max_tokens=max_tokens, salt=tenant, adapter=adapter)
        )
        return number

    def step(self) -> None:
        self._num_steps += 1
        assert self._num_steps < MOST_STEPS, "it does not end"
        scheduler = self.engine.scheduler
        schedule = scheduler.schedule

        def watched() -> Plan | None:
            plan = schedule()
            if plan is not None:
                for arrival in plan.arrivals:
                    self.rows[arrival.row] = self.tenants[int(arrival.request_id)]
                for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
                    self.served[self.rows[int(row)]] += int(num_tokens)
            return plan

        scheduler.schedule = watched  # type: ignore[method-assign]
        for output in self.engine.loop.step():  # without the audits of `SchedulerHarness.step`
            if output.finish_reason is not None:
                self.order.append(int(output.request_id))
        scheduler.schedule = schedule  # type: ignore[method-assign]
        if self.keeps_history:
            lanes = scheduler._admission.waiting.lanes.values()
            waiting = {r.submit.salt or "" for lane in lanes for r in lane}
            self.history.append((dict(self.served), waiting))

    def run(self) -> None:
        while self.engine.loop.has_work:
            self.step()

    def largest_difference(self) -> int:
        """Over all pairs of tenants and all intervals in which both wait throughout: by how many
        tokens what they are served differs."""
        largest = 0
        spans: dict[tuple[str, str], tuple[int, int]] = {}
        for served, waiting in self.history:
            pairs = list(itertools.combinations(sorted(waiting), 2))
            now: dict[tuple[str, str], tuple[int, int]] = {}
            for one, other in pairs:
                ahead = served.get(one, 0) - served.get(other, 0)
                low, high = spans.get((one, other), (ahead, ahead))
                now[one, other] = (min(low, ahead), max(high, ahead))
                largest = max(largest, now[one, other][1] - now[one, other][0])
            spans = now
        return largest


@pytest.mark.parametrize("seed", range(4))
def test_l08_who_ran_alone_for_long_takes_turns_with_200_newcomers(seed: int) -> None:
    """L08: what one tenant had while no other tenant waited is no debt of it, whether it paused in
    between or not, and whether it still runs when the others come."""
    rng = random.Random(seed)
    shares = Shares(max_num_seqs=rng.choice([1, 4]), budget=64)
    for _ in range(rng.randint(20, 60)):
        shares.ask("old", rng.randint(3, 12), rng.randint(1, 12))
        for _ in range(rng.choice([0, 1, 30])):
            shares.step()
    shares.run()
    if seed % 2:
        shares.ask("old", 4, 60)
        for _ in range(58):
            shares.step()
    tenants = ["old", *(f"new{number}" for number in range(200))]
    rng.shuffle(tenants)
    # The newcomers ask for twice as much, so that being last is far later than having had turns.
    more = [shares.ask(f"new{number}", 4, 2) for number in range(200) for _ in range(3)]
    asked = {(tenant, turn): shares.ask(tenant, 4, 2) for turn in range(3) for tenant in tenants}
    shares.run()
    order = shares.order
    places = [order.index(asked["old", turn]) for turn in range(3)]
    first = min(order.index(number) for number in (*more, *asked.values()))
    for turn, place in enumerate(places):
        # One turn more for the tokens that it was still given when the others had come.
        assert place - first <= (turn + 2) * 201, "it waited for more than one turn of all tenants"


@pytest.mark.parametrize("seed", range(4))
def test_l08_tenants_that_both_wait_are_served_alike(seed: int) -> None:
    """L08: any intervals, unequal requests, tenants that come and go, several adapters; the
    difference stays within what docs/scheduling.md states, however long it goes on."""
    rng = random.Random(seed)
    rows, longest = rng.choice([1, 2, 3]), 12
    shares = Shares(max_num_seqs=rows, budget=16)
    for name in "ab":
        shares.engine.scheduler.load_adapter(
            AdapterName(name), AdapterSpec(AdapterDigest(name.encode()), 8, 100), path=name
        )
        shares.ask("warm", 3, 1, adapter=name)
        shares.run()
    shares.keeps_history = True
    sizes = {f"t{number}": rng.randint(3, longest - 1) for number in range(6)}
    adapters = {tenant: rng.choice([None, None, "a", "b"]) for tenant in sizes}
    for _ in range(30):
        present = rng.sample(sorted(sizes), rng.randint(1, len(sizes)))
        for tenant in present:
            for _ in range(rng.randint(1, 6)):
                length = rng.randint(3, sizes[tenant])
                shares.ask(tenant, length, rng.randint(1, longest - length), adapters[tenant])
        for _ in range(rng.choice([2, 10, 60])):
            shares.step()
    shares.run()
    bound = 2 * rows * longest
    assert sum(shares.served.values()) > 20 * bound
    assert shares.largest_difference() <= bound


def test_l08_no_account_outlives_its_tenant() -> None:
    """L08: 300 salts through the engine, some aborted while they wait; nothing is left."""
    shares = Shares(max_num_seqs=4)
    for number in range(300):
        shares.ask(f"t{number}", 3, 2)
    for _ in range(5):
        shares.step()
    policy = shares.engine.scheduler._admission.waiting.policy
    assert isinstance(policy, FairPolicy)
    accounts = policy.accounts
    assert len(accounts) > 200
    for number in range(100, 200):
        shares.engine.scheduler.abort(number)  # type: ignore[arg-type]
    shares.run()
    assert len(accounts) == 0
