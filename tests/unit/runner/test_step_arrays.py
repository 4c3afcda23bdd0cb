"""A decode step's arrays: padding that changes nothing, and adapters in few blocks."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.ids import AdapterSlot, RequestId, Row, StepId
from manyroots.kernels.attention.paged import QUERY_BLOCK, query_blocks
from manyroots.kernels.lora_ops.sites import row_blocks
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import NOWHERE, SpareRow, StepInputs, blank_decode
from manyroots.runner.step_arrays import decode_arrays, sampling_rows
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, Plan

NEVER = 2**31 - 1
SPARE = 40


def decode(slots: list[int | None], begins: list[int]) -> StepInputs:
    """One token each of rows with these adapters, which act from these positions on."""
    batch = PersistentBatch(max_num_seqs=SPARE, max_model_len=16, page_size=4, num_paged=2)
    arrivals = tuple(
        Arrival(
            Row(row), RequestId(row), np.array([5, 6, 7], np.int32), 3, 2,
            (np.array([row], np.int32), np.array([row + 50], np.int32)), SamplingParams(), row, (),
            None if slot is None else AdapterSlot(slot), begin,
        )
        for row, (slot, begin) in enumerate(zip(slots, begins, strict=True))
    )  # fmt: skip
    count = len(slots)
    plan = Plan(
        StepId(0), arrivals, (), np.arange(count, dtype=np.int32), np.ones(count, np.int32),
        np.arange(count) != 1,
    )  # fmt: skip
    batch.apply(plan)
    return batch.inputs(plan)


def arrays_of(inputs: StepInputs, size: int) -> dict[str, np.ndarray]:
    return decode_arrays(inputs, size=size, num_slots=2, spare_units=np.empty(0, np.int32))


def test_padding_repeats_the_last_row_and_writes_nowhere() -> None:
    inputs = decode([None, 1, 0], [0, 0, 0])
    arrays = arrays_of(inputs, 8)
    last = int(inputs.rows[-1])
    assert arrays["token_rows"].tolist()[3:] == [last] * 5
    assert arrays["adapter_slots"].tolist() == [-1, 0, *[1] * 6]
    rows = inputs.rows.tolist()
    assert arrays["pages"][0].tolist() == rows + [NOWHERE] * 5
    assert arrays["pages"][1].tolist() == [row + 50 for row in rows] + [NOWHERE] * 5
    # The row that does not sample, and padding, draw into the spare row.
    assert sampling_rows(inputs, size=8, spare_row=SPARE).tolist() == [0, 2, *[SPARE] * 6]


@pytest.mark.parametrize("slots", [[None, 1, 0], [None, None]])
def test_a_graphs_arrays_have_the_shapes_it_was_captured_with(slots: list[int | None]) -> None:
    inputs = decode(slots, [0] * len(slots))
    has_adapters = inputs.token_slots is not None
    blank = blank_decode(8, SpareRow(SPARE, 2, np.empty(0, np.int32)), with_adapters=has_adapters)
    ours, captured = arrays_of(inputs, 8), arrays_of(blank, 8)
    assert {n: (a.shape, a.dtype) for n, a in ours.items()} == {
        n: (a.shape, a.dtype) for n, a in captured.items()
    }


def test_adapters_that_do_not_act_yet_lie_with_the_base_model() -> None:
    """However they are mixed, a step has no more runs of rows than adapters, and one."""
    slots: list[int | None] = [0, 1] * 16
    begins = [NEVER, 0, 0, NEVER] * 8
    arrays = arrays_of(decode(slots, begins), 32)
    acting = arrays["adapter_slots"]
    assert acting.tolist() == sorted(acting.tolist())
    assert arrays["num_adapter_blocks"][0] == 3


def test_f05_padding_has_the_spare_states() -> None:
    """F05: it repeats the last sequence, and must not compute that one's state a second time."""
    batch = PersistentBatch(
        max_num_seqs=3, max_model_len=16, page_size=4, num_paged=1, spare_units=[9]
    )
    tables = [(np.array([row], np.int32), np.array([row + 4], np.int32)) for row in range(2)]
    arrivals = tuple(
        Arrival(
            Row(row), RequestId(row), np.array([5, 6, 7], np.int32), 3, 2, pages,
            SamplingParams(), row, (), None, 0,
        )
        for row, pages in enumerate(tables)
    )  # fmt: skip
    plan = Plan(
        StepId(0), arrivals, (), np.arange(2, dtype=np.int32), np.ones(2, np.int32),
        np.ones(2, np.bool_),
    )  # fmt: skip
    batch.apply(plan)
    inputs = batch.inputs(plan)
    arrays = decode_arrays(inputs, size=4, num_slots=0, spare_units=batch.units[:, -1])
    assert arrays["units"].tolist() == [[4, 5, 9, 9]]


@pytest.mark.parametrize("seed", range(10))
def test_prompts_are_cut_into_blocks_of_which_the_longest_contexts_come_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5 * QUERY_BLOCK, rng.integers(1, 9))
    lens = counts + rng.integers(0, 300, len(counts)) * rng.integers(0, 2, len(counts))
    wanted = [
        (seq, first) for seq, count in enumerate(counts) for first in range(0, count, QUERY_BLOCK)
    ]
    # Of those that see as much, in the order of the sequences.
    wanted.sort(key=lambda block: counts[block[0]] - lens[block[0]] - block[1])
    starts = [7, *(7 + np.cumsum(counts)).tolist()]
    blocks = query_blocks(starts, lens.tolist())
    assert blocks.dtype == np.int32
    assert blocks.tolist() == [list(block) for block in wanted]
    assert query_blocks([3], []).shape == (0, 2)


@pytest.mark.parametrize("seed", range(10))
def test_runs_of_an_adapter_are_cut_into_blocks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = np.repeat(rng.integers(-1, 4, 6), rng.integers(1, 40, 6)).astype(np.int64)
    blocks = row_blocks(slots, 16)
    assert blocks.dtype == np.int32
    covered = np.concatenate([np.arange(first, first + count) for first, count, _ in blocks])
    assert covered.tolist() == list(range(len(slots)))
    changes = np.flatnonzero(np.diff(slots)) + 1
    for first, count, slot in blocks.tolist():
        assert 1 <= count <= 16
        assert set(slots[first : first + count].tolist()) == {slot}
        # Only a run's last block may be smaller than a block.
        assert count == 16 or first + count in {*changes.tolist(), len(slots)}
    assert row_blocks(np.empty(0, np.int64), 16).shape == (0, 3)


def test_tokens_come_back_in_the_order_of_the_plan_whatever_the_layout() -> None:
    slots: list[int | None] = [2, None, 1, 2, None, 1]
    inputs = decode(slots, [0] * len(slots))
    sampled_rows = inputs.rows[inputs.sampling]
    assert sorted(inputs.sampling.tolist()) == inputs.sampling.tolist()
    # All but row 1 sample, and the plan has them in the order of rows.
    assert sampled_rows[inputs.sampling_order].tolist() == [0, 2, 3, 4, 5]
    assert sampled_rows.tolist() != [0, 2, 3, 4, 5]
