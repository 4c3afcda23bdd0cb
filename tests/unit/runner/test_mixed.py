"""Steps of prompts beside decodes in a graph's shape, and what they are padded with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from manyroots.ids import NO_ADAPTER
from manyroots.runner.inputs import NOWHERE, StepInputs
from manyroots.runner.mixed import (
    MAX_PROMPTS,
    TOKENS,
    all_shapes,
    mixed_arrays,
    sampled_rows,
    shape_for,
)

SPARE = 99


def step(num_decodes: int, prompts: list[int], slots: list[int] | None = None) -> StepInputs:
    """`slots`: of each sequence."""
    counts = np.array([1] * num_decodes + prompts)
    num_tokens = int(counts.sum())
    rows = np.arange(len(counts), dtype=np.int32)
    everybody = np.arange(len(counts))
    return StepInputs(
        rows=rows,
        token_rows=np.repeat(rows, counts),
        tokens=np.arange(1, num_tokens + 1),
        positions=np.arange(num_tokens),
        query_starts=np.concatenate(([0], np.cumsum(counts))),
        context_lens=counts + 10,
        num_decodes=num_decodes,
        pages=np.ones((2, num_tokens), np.int32),
        offsets=np.zeros(num_tokens, np.int64),
        units=np.empty((0, len(counts)), np.int32),
        token_slots=None if slots is None else np.repeat(np.array(slots), counts),
        sampling=everybody,
        sampling_order=everybody,
        sampled_at=np.cumsum(counts) - 1,
        guesses=np.zeros(len(counts), np.int64),
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_shape_holds_its_step_and_every_step_of_a_shape_has_the_same_arrays(seed: int) -> None:
    rng = np.random.default_rng(seed)
    max_num_seqs = int(rng.choice([20, 64, 256]))
    num_decodes = int(rng.integers(0, max_num_seqs - 10))
    prompts = rng.integers(2, 200, int(rng.integers(1, 10))).tolist()
    num_slots = 3
    slots = [
        *np.sort(rng.integers(NO_ADAPTER, num_slots, num_decodes)).tolist(),
        *np.sort(rng.integers(NO_ADAPTER, num_slots, len(prompts))).tolist(),
    ]
    inputs = step(num_decodes, prompts, slots)
    shape = shape_for(inputs, max_num_seqs)
    assert shape is not None
    assert len(inputs.tokens) <= shape.num_tokens
    assert num_decodes <= shape.num_decodes <= shape.num_tokens
    assert len(inputs.rows) <= shape.num_samples
    arrays = mixed_arrays(inputs, shape, num_slots=num_slots, spare_row=SPARE)
    other = step(0, [2], [NO_ADAPTER])
    blank = mixed_arrays(other, shape, num_slots=num_slots, spare_row=SPARE)
    assert arrays is not None
    assert blank is not None
    assert {k: (v.shape, v.dtype) for k, v in arrays.items()} == {
        k: (v.shape, v.dtype) for k, v in blank.items()
    }
    count = len(inputs.tokens)
    assert (arrays["pages"][:, count:] == NOWHERE).all()
    assert (arrays["token_rows"][count:] == SPARE).all()
    assert (arrays["adapter_slots"][count:] == NO_ADAPTER).all()
    assert (arrays["lens"] > 0).sum() == len(inputs.rows)
    assert (arrays["lens"][num_decodes : shape.num_decodes] == 0).all()
    covered = np.zeros(shape.num_tokens, int)
    starts = arrays["starts"]
    for seq, first in arrays["blocks"]:
        end = starts[seq + 1] - starts[seq]
        covered[starts[seq] + first : starts[seq] + min(first + 128, end)] += 1
    assert (covered[num_decodes:count] == 1).all()
    assert covered.sum() == count - num_decodes
    rows = sampled_rows(inputs, shape, SPARE)
    assert rows[: len(inputs.rows)].tolist() == inputs.rows.tolist()
    assert (rows[len(inputs.rows) :] == SPARE).all()


def test_what_is_too_large_has_no_shape() -> None:
    assert shape_for(step(3, [TOKENS[-1]]), 64) is None
    assert shape_for(step(0, [2] * (MAX_PROMPTS + 1)), 64) is None
    assert shape_for(step(0, [TOKENS[-1]]), 64) is not None
    guessing = step(2, [6] * 8)
    assert shape_for(guessing, 10) is not None
    positions = np.repeat(guessing.sampling, 2)  # of each row a token, and one after a guess
    assert shape_for(replace(guessing, sampling=positions, sampled_at=positions), 10) is None
    assert all_shapes(256, 8192)[0].num_tokens == TOKENS[-1]
    assert all_shapes(256, 700)[0].num_tokens == 768


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(4, 192), (64, 2048), (256, 8192)])
def test_every_shape_that_a_step_may_have_is_captured_at_start(
    max_num_seqs: int, budget: int
) -> None:
    shapes = all_shapes(max_num_seqs, budget)
    assert len(shapes) < 50, "each takes a tenth of a second"
    assert shapes == sorted(shapes, key=lambda s: (s.num_tokens, s.num_decodes), reverse=True)
    for num_decodes in {0, 1, min(17, max_num_seqs - 1), max_num_seqs - 1}:
        for num_tokens in range(num_decodes + 2, min(budget, TOKENS[-1]) + 1, 7):
            shape = shape_for(step(num_decodes, [num_tokens - num_decodes]), max_num_seqs)
            assert shape in shapes


def test_more_runs_than_there_is_room_for_are_no_graph() -> None:
    """An adapter that begins within a prompt makes two runs of it."""
    inputs = step(0, [4] * 30)
    slots = np.tile([NO_ADAPTER, NO_ADAPTER, 0, 0], 30)
    shape = shape_for(inputs, 64)
    assert shape is not None
    inputs = StepInputs(
        **{n: getattr(inputs, n) for n in StepInputs.__slots__ if n != "token_slots"},
        token_slots=slots,
    )
    assert mixed_arrays(inputs, shape, num_slots=1, spare_row=SPARE) is None
