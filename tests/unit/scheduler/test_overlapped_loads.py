"""Requests that begin while their pages still come from the host: which may, and that the results
are as if they had waited."""

from __future__ import annotations

import random

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, LoadCosts
from manyroots.ids import RequestId
from manyroots.messages import Abort, FinishReason
from manyroots.step import Copy
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit

FULL = Capacity(FULL_ATTENTION, 12, 80)
WINDOW = Capacity(SlidingWindow("window", 6, 4), 12, 80)
STATES = Capacity(RecurrentState("recurrent", interval=2), 4, 80)
PROMPTS = [[40 - talk, *range(1, 20), talk] for talk in range(4)]
"""The device holds two."""


class Slow:
    """Copies end when they are let; those that overlapped are remembered."""

    def __init__(self, *capacities: Capacity, **policies: object) -> None:
        self.rng = random.Random(1)
        self.share = 1.0
        self.overlapped: set[int] = set()
        self.engine = SchedulerHarness(
            capacities=capacities or (FULL,),
            policies=CachePolicies(overlaps_loads=True, **policies),  # type: ignore[arg-type]
            finish_copies=self._finish,
            max_model_len=40,
        )
        self.number = 0

    def _finish(self, copies: list[Copy]) -> list[tuple[Copy, bool]]:
        self.overlapped |= {int(copy.copy_id) for copy in copies if copy.is_overlapped}
        done = [copy for copy in copies if self.rng.random() < self.share]
        return [(copy, True) for copy in done]

    def ask(self, prompt: list[int], max_tokens: int = 4) -> int:
        """Submit; gives the request's number."""
        self.number += 1
        self.engine.loop.handle(submit(self.number, prompt, max_tokens=max_tokens))
        return self.number

    def fill(self) -> None:
        """Ask for everything once, so that it is on the host, and the last of it on the device."""
        for prompt in PROMPTS:
            self.ask(prompt)
            self.engine.run()
        assert not self.overlapped


def test_t10_a_request_alone_begins_while_its_pages_come() -> None:
    """T10: its first token is there before its copy is acknowledged."""
    slow = Slow()
    slow.fill()
    slow.share = 0.0
    number = slow.ask(PROMPTS[0])
    for _ in range(3):
        slow.engine.step()
    assert slow.overlapped
    assert slow.engine.tokens(number), "it waited for its copy"
    assert slow.engine.cache.has_transfers
    slow.share = 1.0
    slow.engine.run()
    assert slow.engine.tokens(number) == expected_tokens(submit(number, PROMPTS[0]))
    assert slow.engine.last(number).num_cached_tokens == 20


def test_t10_others_do_not_wait_for_somebodys_pages() -> None:
    """T10: beside one that runs, a request waits alone, as without overlapping."""
    slow = Slow()
    slow.fill()
    running = slow.ask([30, 31, 32], max_tokens=12)
    slow.engine.step()
    slow.ask(PROMPTS[0])
    slow.engine.run()
    assert not slow.overlapped
    assert len(slow.engine.tokens(running)) == 12


@pytest.mark.parametrize(
    ("capacities", "policies"),
    [
        ((FULL, STATES), {}),
        ((FULL,), {"load_costs": LoadCosts(seconds_per_page=0.03, seconds_per_token=1.0)}),
    ],
    ids=["a state is restored before the first layer", "it would take long"],
)
def test_t10_what_can_not_or_should_not_overlap_waits(
    capacities: tuple[Capacity, ...], policies: dict[str, object]
) -> None:
    """T10: a state that comes, or pages that take longer than a newcomer should wait."""
    slow = Slow(*capacities, **policies)
    slow.fill()
    number = slow.ask(PROMPTS[0])
    slow.engine.run()
    assert not slow.overlapped
    assert slow.engine.last(number).num_cached_tokens > 0


@pytest.mark.parametrize("capacities", [(FULL,), (WINDOW,), (FULL, WINDOW)], ids=str)
def test_t10_whatever_happens_meanwhile_everybody_has_his_own_tokens(
    capacities: tuple[Capacity, ...],
) -> None:
    """T10, T08, T09: aborts, failing steps, sharers and late acknowledgements; audited after every
    step, and the fake runner reads every page through its table."""
    slow, rng = Slow(*capacities), random.Random(5)
    slow.fill()
    asked: dict[int, list[int]] = {}
    for _ in range(120):
        slow.share = rng.choice([0.0, 0.3, 1.0])
        prompt = [*rng.choice(PROMPTS)[: rng.randint(9, 21)], *([7] * rng.randint(0, 3))]
        asked[slow.ask(prompt)] = prompt
        for _ in range(rng.randint(0, 4)):
            slow.engine.step()
        if rng.random() < 0.2:
            slow.engine.loop.handle(Abort([RequestId(slow.number)]))
        if rng.random() < 0.1:
            slow.engine.runner.fail_next = "planted"
        if rng.random() < 0.5:
            slow.share = 1.0
            slow.engine.run()
    slow.share = 1.0
    slow.engine.run()
    for number, prompt in asked.items():
        want, got = expected_tokens(submit(number, prompt)), slow.engine.tokens(number)
        ended_well = slow.engine.last(number).finish_reason is FinishReason.LENGTH
        assert got == (want if ended_well else want[: len(got)])
    assert len(slow.overlapped) >= 10
    assert slow.engine.scheduler.stats().num_held_pages == 0
