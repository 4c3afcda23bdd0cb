"""What rounding explains, and what it does not: the judge of `tests.soaks.mixed_workloads`."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from manyroots.ids import RequestId
from manyroots.kernels.fused_moe import torch_ops as moe_ops
from manyroots.messages import Submit
from manyroots.runner.drafts import DraftRows
from manyroots.sampling import SamplingParams
from tests.helpers.plain_sampler import PlainRow
from tests.helpers.sampled_rows import Rows
from tests.soaks.mixed_workloads import (
    MAX_LEN,
    Answer,
    Driver,
    Judge,
    Weather,
    world_of,
)  # fmt: skip
from tests.soaks.mixed_workloads import VOCAB as SOAK_VOCAB
from tests.soaks.near_ties import CLOSE, CLOSE_SCORES, Difference, near_tie, token_gaps

MIX, WEIGHTS, CONTENT = "delta nets, other experts", "one", "other"
PROMPT = [
    227, 278, 164, 55, 16, 72, 80, 126, 4, 186, 46, 113, 271, 36, 30, 201, 196, 105, 144, 212, 253,
    25, 270, 57, 145, 268, 206, 118, 214, 131, 255, 33, 99, 209, 134, 92, 89, 235, 83, 43, 21, 21,
    224, 119, 285, 91, 140, 279, 47,
]  # fmt: skip
"""Seed 164 of the soak: scores of two experts are 9e-7 apart after 10 more tokens."""
NOISE = 4e-6
NUM_ANSWERS = 4
VOCAB, NUM_ROWS = 32, 4

Route = Callable[..., Any]


# Tokens


CUTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "draw": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "min_p, hot": {"min_p": 0.1, "temperature": 2.0},
}


def row_of(logits: Tensor, cut: str, seed: int) -> PlainRow:
    return PlainRow(logits.tolist(), SamplingParams(**({"temperature": 1.0} | CUTS[cut])), seed)


def at_a_border(cut: str, seed: int) -> tuple[PlainRow, int]:
    """A row, and the token of another one whose logits are as good as equal: between any two that
    give different tokens there is a border."""
    generator = torch.Generator().manual_seed(seed)
    one = two = torch.randn(VOCAB, generator=generator)
    told = row_of(one, cut, seed).token()
    while row_of(two, cut, seed).token() == told:
        two = torch.randn(VOCAB, generator=generator)
    while (one - two).abs().max() > 0.2 * CLOSE:
        middle = (one + two) / 2
        if row_of(middle, cut, seed).token() == told:
            one = middle
        else:
            two = middle
    return row_of(one, cut, seed), row_of(two, cut, seed).token()


@pytest.mark.parametrize("cut", CUTS)
def test_v01_a_token_that_rounding_moves_over_any_border_is_a_near_tie(cut: str) -> None:
    """V01: the border of the draw and of each cut."""
    for seed in range(NUM_ROWS):
        row, moved = at_a_border(cut, seed)
        rows = Rows([row])
        gaps = token_gaps(rows.logits, rows.rows([0]))
        assert gaps.get(moved, 1.0) <= CLOSE, (cut, seed)


@pytest.mark.parametrize("cut", CUTS)
def test_v01_hardly_any_other_token_is_a_near_tie(cut: str) -> None:
    """V01: of tokens that a fault may give, all but a few are reported."""
    generator, num_excused = torch.Generator().manual_seed(1), 0
    for seed in range(NUM_ROWS):
        rows = Rows([row_of(torch.randn(VOCAB, generator=generator), cut, seed)])
        gaps = token_gaps(rows.logits, rows.rows([0]))
        assert rows.plain[0].token() in gaps
        num_excused += len(gaps) - 1
    assert num_excused == 0, "near ties are rare"


# Experts


def asked() -> tuple[Callable[[Submit], Answer], Submit]:
    sampling = SamplingParams(
        max_tokens=11, temperature=1.0, top_k=1, ignore_eos=True, logprobs=5,
        logit_bias={61: -100.0, 202: -100.0, 147: 8.0},
    )  # fmt: skip
    submit = Submit(RequestId(1), PROMPT, None, sampling, 0, (), None)
    ask = world_of(MIX).engine(WEIGHTS).ask
    return functools.partial(ask, CONTENT), submit


def with_noise(route: Route, seed: int) -> Route:
    generator = torch.Generator().manual_seed(seed)

    def noisy(scores: Tensor, *rest: Any, **named: Any) -> Any:
        noise = NOISE * (2 * torch.rand(scores.shape, generator=generator) - 1)
        return route(scores + noise, *rest, **named)

    return noisy


@pytest.fixture(scope="module")
def difference() -> Difference:
    """The first log-probabilities that differ if scores of routers are rounded otherwise."""
    ask, submit = asked()
    cold = ask(submit)
    for seed in range(20):
        with mock.patch.object(moe_ops, "route", with_noise(moe_ops.route, seed)):
            ours = ask(submit)
        for at, (one, other) in enumerate(zip(ours.logprobs, cold.logprobs, strict=True)):
            if one.token != other.token or abs(one.logprob - other.logprob) > 10 * CLOSE:
                before = [*PROMPT, *cold.tokens[:at]]
                return Difference(before, at, one.token, other.token, one, other)
    raise AssertionError("no noise changes a choice")


def test_v01_scores_of_experts_within_rounding_are_a_near_tie(difference: Difference) -> None:
    tie = near_tie(*asked(), difference)
    assert tie is not None
    assert tie.kind == "experts"
    assert tie.gap <= 2 * NOISE < CLOSE_SCORES


def test_v01_a_near_tie_of_experts_excuses_only_what_it_leads_to(difference: Difference) -> None:
    """V01: another token or another log-probability at the same place stays a difference."""
    ours = difference.our_scores
    assert ours is not None
    off = replace(ours, logprob=ours.logprob + 0.01)
    assert near_tie(*asked(), replace(difference, our_scores=off)) is None
    token = next(t for t in range(3, 9) if t not in (difference.ours, difference.theirs))
    wrong = replace(difference, ours=token, our_scores=None, their_scores=None)
    assert near_tie(*asked(), wrong) is None


def driven(settings: dict[str, Any]) -> Driver:
    """An engine whose drafts are partly wrong, after it has answered a few requests."""
    world, rng = world_of(MIX), random.Random(0)
    driver = Driver(world, rng, Weather(rng), None, is_told=True, **settings)
    for number in range(NUM_ANSWERS):
        prompt = [rng.randrange(3, SOAK_VOCAB) for _ in range(9)]
        sampling = SamplingParams(
            max_tokens=12, temperature=float(number % 2), seed=number, ignore_eos=True
        )
        driver.submit(prompt, sampling, None, None, 0)
    driver.drain()
    driver.close()
    return driver


@pytest.mark.parametrize("is_planted", [False, True])
def test_v01_v04_a_planted_fault_is_found_beside_near_ties(
    monkeypatch: pytest.MonkeyPatch, *, is_planted: bool
) -> None:
    """V01, V04: a runner that keeps the states of wrong guesses. No wrong answer is excused."""
    settle = DraftRows.settle

    def keep_states(rows: DraftRows) -> None:
        rows._states = ()
        settle(rows)

    if is_planted:
        monkeypatch.setattr(DraftRows, "settle", keep_states)
    world, told = world_of(MIX), Counter[str]()
    memory = 4 * MAX_LEN * world.page_bytes + 8 * world.state_bytes
    config = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
    driver = driven({
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": memory,
        "speculative_config": json.dumps(config),
    })  # fmt: skip
    stats = driver.loop.stats().speculation
    assert stats is not None
    assert 0 < stats.total_accepted_tokens < stats.total_draft_tokens
    judge, num_reported, num_wrong = Judge(world, told, "planted"), 0, 0
    for live in driver.over:
        num_wrong += live.answer.tokens != world.alone(live.weights, None, live.submit).tokens
        try:
            judge.compare(live)
        except AssertionError:
            num_reported += 1
    assert told["compared"] == NUM_ANSWERS
    assert num_reported == num_wrong
    assert (num_wrong > 0) == is_planted
