"""The sampler against distributions worked out by hand (S01), and what it keeps between steps."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from manyroots.ids import Row
from manyroots.kernels.sampling import reference, torch_ops
from manyroots.kernels.sampling.rows import (
    ALL_FORBIDDEN,
    IN_PROMPT,
    NO_FAULT,
    NOT_FINITE,
    Sampled,
    SamplingRows,
)
from manyroots.runner.logprobs import score
from manyroots.sampling import SamplingParams
from tests.helpers.plain_sampler import PlainRow
from tests.helpers.sampled_rows import Rows

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
LOGITS = PROBS.log()
OWN = ("prompt", "output", "seed", "stop_ids", "mask")
ALL = pytest.mark.parametrize("sampler", [torch_ops, reference], ids=["torch_ops", "reference"])


def rows_of(requests: list[dict[str, Any]], logits: list[list[float]]) -> Rows:
    """One row per request; keys that a row has none of are parameters."""
    rows = []
    for number, given in enumerate(requests):
        request = {
            "prompt": [0],
            "output": [],
            "seed": number,
            "stop_ids": (),
            "mask": None,
            **given,
        }
        own = {name: request.pop(name) for name in ("prompt", "output", "seed", "stop_ids", "mask")}
        rows.append(PlainRow(logits[number], SamplingParams(**request), **own))
    return Rows(rows)


def sample(sampler: ModuleType, rows: Rows) -> tuple[Sampled, SamplingRows]:
    return rows.sample(sampler.sample, range(len(rows.plain)))


def draw_many(count: int = 20_000, **params: Any) -> torch.Tensor:
    """Frequencies over many seeds."""
    asked, logits = SamplingParams(**params), LOGITS.tolist()
    rows = Rows([PlainRow(logits, asked, seed) for seed in range(count)])
    sampled, _ = sample(torch_ops, rows)
    assert not sampled.faults.any()
    return torch.bincount(sampled.tokens, minlength=5) / count


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.25, 0.15, 0.07, 0.03]),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": -1}, [0.5, 0.25, 0.15, 0.07, 0.03]),
        ({"temperature": 1.0, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"temperature": 1.0, "min_p": 0.25}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"temperature": 0.5}, [0.7246, 0.1812, 0.0652, 0.0142, 0.0026]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
    ],
)
def test_s01_frequencies_are_the_distribution_asked_for(
    params: dict[str, Any], expected: list[float]
) -> None:
    """S01: temperature, top-k, top-p and min-p, against closed forms."""
    frequencies = draw_many(**params)
    # Four standard deviations of a frequency over 20,000 draws.
    assert (frequencies - torch.tensor(expected)).abs().max() < 4 * (0.25 / 20_000) ** 0.5
    assert ((torch.tensor(expected) > 0) | (frequencies == 0)).all()


@ALL
def test_penalties_bias_minimum_length_and_masks(sampler: ModuleType) -> None:
    """S01: repetition over prompt and output; frequency and presence over output only."""
    requests: list[dict[str, Any]] = [
        {"prompt": [0, 3], "output": [1, 1], "frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"output": [1], "repetition_penalty": 100.0},
        {"logit_bias": {4: 100.0}},
        {"min_tokens": 1, "stop_ids": (1, 0)},
        {"min_tokens": 1, "output": [2], "stop_ids": (1,)},
        {"mask": [True, False, True, True, True]},
    ]
    logits = [[3.0, 4.0, 1.0, 0.5, 0.0]] * len(requests)
    rows = rows_of([{"temperature": 0, **request} for request in requests], logits)
    sampled, _ = sample(sampler, rows)
    # Row 0: 4 - 2*2 = 0. Row 1: nothing said yet. Row 2: 3/100 and 4/100 fall below 1.
    assert sampled.tokens.tolist() == [0, 1, 2, 4, 2, 1, 0]
    assert not sampled.faults.any()


@ALL
def test_tokens_are_counted_for_rows_with_penalties_alone(sampler: ModuleType) -> None:
    """Step by step on the device, as if the row had arrived with all of them."""
    requests: list[dict[str, Any]] = [
        {"prompt": [0, 3], "output": [1, 1], "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"prompt": [0, 3], "output": [1, 1]},
    ]
    logits = [[3.0, 4.0, 1.0, 0.5, 0.0]] * 2
    rows = rows_of([{"temperature": 1.0, **request} for request in requests], logits)
    asked = rows.rows([0, 1])
    counts = asked.tables.counts
    assert counts.tolist() == [[IN_PROMPT, 2, 0, IN_PROMPT, 0], [0] * 5, [0] * 5]
    said = [1, 1]
    for _ in range(6):
        sampled = sampler.sample(rows.logits.clone(), asked)
        said.append(int(sampled.tokens[0]))
        asked.indices.add_(1)
        again = rows_of([{**requests[0], "temperature": 1.0, "output": said}], logits)
        assert counts[0].tolist() == again.tables.counts[0].tolist()
    assert len(set(said)) > 2
    assert not counts[1:].any()


@ALL
def test_a_row_without_a_choice_is_reported_and_the_others_are_good(sampler: ModuleType) -> None:
    logits = [[0.0, 1.0], [float("nan"), 0.0], [1.0, 0.0], [0.0, 1.0]]
    requests: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "logprobs": 1},
        {"temperature": 0, "mask": [False, False], "logprobs": 1, "presence_penalty": 1.0},
        {"temperature": 0},
    ]
    sampled, asked = sample(sampler, rows_of(requests, logits))
    assert sampled.faults.tolist() == [NO_FAULT, NOT_FINITE, ALL_FORBIDDEN, NO_FAULT]
    assert sampled.tokens[[0, 3]].tolist() == [1, 1]
    assert asked.tables.counts[2].tolist() == [IN_PROMPT, 0]


def test_a_row_that_leaves_takes_what_it_asked_for_with_it() -> None:
    """The next owner's tables hold nothing of the last one's."""
    rows = rows_of([{"presence_penalty": 1.0, "output": [1, 2], "logprobs": 3}], [[0.0] * 5])
    heir = rows_of([{"presence_penalty": 1.0, "prompt": [4]}], [[0.0] * 5])
    plain = rows_of([{"temperature": 0.0}], [[0.0] * 5])
    state = rows.state
    state.apply([heir._arrival(Row(0), heir.plain[0])])
    assert state.tables.counts[0].tolist() == [0, 0, 0, 0, IN_PROMPT]
    state.apply([plain._arrival(Row(0), plain.plain[0])])
    blank = plain.state.arrays(np.array([1], np.int32), np.zeros(1, np.int64))
    left = state.arrays(np.array([0], np.int32), np.zeros(1, np.int64))
    for name, values in left.items():
        assert name in ("table_rows", "request_rows", "seeds") or values[0] == blank[name][0], name


def test_scores_are_log_probabilities_with_ranks() -> None:
    [first, second] = score(LOGITS.repeat(2, 1) + 3.0, torch.tensor([2, 0]), [2, 0])
    assert first.token == 2
    assert first.rank == 3
    assert first.logprob == pytest.approx(float(LOGITS[2]), abs=1e-5)
    assert first.top_tokens == (0, 1)
    assert first.top_logprobs == pytest.approx(LOGITS[:2].tolist(), abs=1e-5)
    assert second.rank == 1
    assert second.top_tokens == ()
