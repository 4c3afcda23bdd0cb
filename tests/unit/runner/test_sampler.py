"""The sampler against distributions worked out by hand (S01)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from manyroots.ids import RequestId, Row, StepId
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.logprobs import score
from manyroots.runner.sampler import NOT_FINITE, Sampler
from manyroots.runner.sampling_state import SamplingState
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, Plan

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
LOGITS = PROBS.log()


def sampler(requests: list[dict[str, Any]]) -> tuple[Sampler, PersistentBatch]:
    """One row per request; keys other than prompt, output, stop_ids and seed are parameters."""
    batch = PersistentBatch(max_num_seqs=len(requests), max_model_len=64, page_size=16)
    state = SamplingState(len(requests))
    arrivals = []
    for row, given in enumerate(requests):
        request = dict(given)
        prompt, output = request.pop("prompt", [0]), request.pop("output", [])
        seed, stop_ids = request.pop("seed", row), request.pop("stop_ids", ())
        arrivals.append(
            Arrival(
                row=Row(row), request_id=RequestId(row),
                tokens=np.array(prompt + output, np.int32), num_prompt_tokens=len(prompt),
                num_computed_tokens=0, page_tables=(np.array([row], np.int32),),
                sampling=SamplingParams(**request), seed=seed, stop_ids=stop_ids,
                adapter_slot=None, adapter_from=0,
            )
        )  # fmt: skip
        state.arrive(arrivals[-1])
    empty = np.empty(0, np.int32)
    batch.apply(Plan(StepId(1), tuple(arrivals), (), empty, empty, np.empty(0, np.bool_)))
    return Sampler(batch, state), batch


def draw_many(count: int = 20_000, **params: Any) -> torch.Tensor:
    """Frequencies over many seeds."""
    chooser, _ = sampler([{"seed": seed, **params} for seed in range(count)])
    choices = chooser.sample(LOGITS.repeat(count, 1), np.arange(count, dtype=np.int32))
    assert not choices.faults
    return torch.bincount(torch.from_numpy(choices.tokens.astype(np.int64)), minlength=5) / count


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


def test_a_rows_choice_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 1000, generator=generator)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.0, "min_p": 0.02, "top_k": 500},
    ]
    chooser, _ = sampler([{"seed": 100 + row, **kinds[row % 5]} for row in range(40)])
    rows = np.arange(40, dtype=np.int32)
    together = chooser.sample(logits.clone(), rows).tokens
    for row in range(40):
        alone = chooser.sample(logits[row : row + 1].clone(), rows[row : row + 1]).tokens
        assert alone[0] == together[row]


def test_penalties_bias_and_minimum_length() -> None:
    """S01: repetition over prompt and output; frequency and presence over output only."""
    chooser, _ = sampler(
        [
            {"temperature": 0, "prompt": [0, 3], "output": [1, 1], "frequency_penalty": 2.0},
            {"temperature": 0, "prompt": [0], "presence_penalty": 2.0},
            {"temperature": 0, "prompt": [0], "output": [1], "repetition_penalty": 100.0},
            {"temperature": 0, "logit_bias": {4: 100.0}},
            {"temperature": 0, "min_tokens": 1, "stop_ids": (0,)},
            {"temperature": 0, "min_tokens": 1, "output": [2], "stop_ids": (0,)},
        ]
    )
    logits = torch.tensor([3.0, 4.0, 1.0, 0.5, 0.0]).repeat(6, 1)
    tokens = chooser.sample(logits, np.arange(6, dtype=np.int32)).tokens
    # Row 0: 4 - 2*2 = 0. Row 1: nothing said yet. Row 2: 3/100 and 4/100 fall below 1.
    assert tokens.tolist() == [0, 1, 2, 4, 1, 1]
    assert logits[0].tolist() == [3.0, 0.0, 1.0, 0.5, 0.0]
    assert logits[4, 0] == -torch.inf
    assert logits[5, 0] == 3.0


def test_a_row_that_is_not_finite_is_reported_and_the_others_are_good() -> None:
    chooser, _ = sampler([{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0}])
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [1.0, 0.0]])
    choices = chooser.sample(logits, np.arange(3, dtype=np.int32))
    assert choices.faults == {1: NOT_FINITE}
    assert choices.tokens[0] == 1
    assert choices.tokens[2] == 0


def test_scores_are_log_probabilities_with_ranks() -> None:
    [first, second] = score(LOGITS.repeat(2, 1) + 3.0, torch.tensor([2, 0]), [2, 0])
    assert first.token == 2
    assert first.rank == 3
    assert first.logprob == pytest.approx(float(LOGITS[2]), abs=1e-5)
    assert first.top_tokens == (0, 1)
    assert first.top_logprobs == pytest.approx(LOGITS[:2].tolist(), abs=1e-5)
    assert second.rank == 1
    assert second.top_tokens == ()
