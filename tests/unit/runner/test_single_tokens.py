"""A step with every token as a row of its own asks for the same as the step it was made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from manyroots.ids import NO_ADAPTER
from manyroots.runner.inputs import (
    MAX_SEEN_TOKENS,
    MAX_SINGLE_TOKENS,
    StepInputs,
    as_single_tokens,
    is_short,
)


def step(counts: list[int], contexts: list[int], token_slots: list[int] | None) -> StepInputs:
    """Sequences 10, 11, ... that all sample, and whose results the plan wants last first."""
    starts = np.cumsum([0, *counts])
    positions = np.concatenate(
        [np.arange(end - count, end) for count, end in zip(counts, contexts, strict=True)]
    )
    num_tokens, num_rows = int(starts[-1]), len(counts)
    return StepInputs(
        rows=np.arange(10, 10 + num_rows, dtype=np.int32),
        token_rows=np.repeat(np.arange(10, 10 + num_rows, dtype=np.int32), counts),
        tokens=np.arange(100, 100 + num_tokens),
        positions=positions,
        query_starts=starts,
        context_lens=np.array(contexts),
        num_decodes=counts.count(1),
        pages=np.stack((positions // 4 + 7, positions // 4 + 30)).astype(np.int32),
        offsets=positions % 4,
        units=np.empty((0, num_rows), np.int32),
        token_slots=None if token_slots is None else np.array(token_slots),
        sampling=np.arange(num_rows),
        sampling_order=np.arange(num_rows)[::-1],
        sampled_at=starts[1:] - 1,
        guesses=np.zeros(num_rows, np.int64),
    )


def test_each_token_keeps_its_sequence_its_place_and_what_it_sees() -> None:
    single = as_single_tokens(step([1, 3, 2], [9, 3, 8], None))
    assert single.num_decodes == len(single.rows) == 6
    assert single.rows.tolist() == [10, 11, 11, 11, 12, 12]
    assert single.tokens.tolist() == [100, 101, 102, 103, 104, 105]
    assert single.positions.tolist() == [8, 0, 1, 2, 6, 7]
    assert single.context_lens.tolist() == [9, 1, 2, 3, 7, 8]
    assert single.pages.tolist() == [[9, 7, 7, 7, 8, 8], [32, 30, 30, 30, 31, 31]]
    assert single.query_starts.tolist() == list(range(7))


def test_the_last_token_of_each_sequence_samples_in_the_order_of_the_plan() -> None:
    single = as_single_tokens(step([1, 3, 2], [9, 3, 8], None))
    assert single.sampling.tolist() == [0, 3, 5]
    sampled = single.rows[single.sampling]
    assert sampled[single.sampling_order].tolist() == [12, 11, 10]


def test_tokens_of_one_adapter_lie_together() -> None:
    """Slot 4 has tokens in both kinds of sequences, and an aLoRA begins within one."""
    single = as_single_tokens(step([1, 1, 3], [9, 5, 8], [4, 6, NO_ADAPTER, 4, 4]))
    assert single.token_slots is not None
    assert single.token_slots.tolist() == [NO_ADAPTER, 4, 4, 4, 6]
    assert single.rows.tolist() == [12, 10, 12, 12, 11]
    assert single.positions.tolist() == [5, 8, 6, 7, 4]
    sampled = single.rows[single.sampling]
    assert sampled[single.sampling_order].tolist() == [12, 11, 10]
    assert (np.diff(single.sampling) > 0).all()


def test_a_step_is_short_by_its_tokens_and_by_what_they_see() -> None:
    assert is_short(step([MAX_SINGLE_TOKENS], [MAX_SINGLE_TOKENS], None))
    assert not is_short(step([MAX_SINGLE_TOKENS + 1], [MAX_SINGLE_TOKENS + 1], None))
    long = step([1, 4, 4], [9, MAX_SEEN_TOKENS // 2, MAX_SEEN_TOKENS // 2], None)
    guessing = replace(long, guesses=np.array([0, 3, 3]))
    assert not is_short(guessing)
    assert is_short(guessing, reads_once=True)
    assert not is_short(long, reads_once=True)
    assert is_short(step([1, 2], [MAX_SEEN_TOKENS, MAX_SEEN_TOKENS // 2], None))
    assert not is_short(step([1, 2], [9, MAX_SEEN_TOKENS // 2 + 2], None))
