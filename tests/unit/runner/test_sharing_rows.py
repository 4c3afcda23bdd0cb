"""Rows that share pages: found again when a row arrives, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from manyroots.kernels.attention import sharing as groups
from manyroots.runner import sharing
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import StepInputs
from manyroots.runner.sharing import Sharing
from manyroots.runner.step_arrays import run_arrays
from manyroots.runner.step_packets import SHARED_DRAFT_LEN, StepPackets
from manyroots.step import Plan

PAGE, NUM_ROWS = 64, 8
ROWS = np.arange(NUM_ROWS, dtype=np.int32)
SOMEBODY, NOBODY = (cast(Plan, SimpleNamespace(arrivals=arrivals)) for arrivals in ([1], []))


def decoding() -> StepInputs:
    lens = np.full(NUM_ROWS, 100 * PAGE)
    step: Any = SimpleNamespace(rows=ROWS, context_lens=lens, num_decodes=NUM_ROWS)
    return cast(StepInputs, step)


def alike(num_pages: int) -> np.ndarray:
    """Tables of rows that begin with so many pages of the first one's."""
    table = np.arange(NUM_ROWS * 100, dtype=np.int32).reshape(NUM_ROWS, 100)
    table[:, :num_pages] = table[0, :num_pages]
    return table


def make_batch() -> PersistentBatch:
    return PersistentBatch(
        max_num_seqs=NUM_ROWS, max_model_len=100 * PAGE, page_size=PAGE, num_paged=2
    )


def test_what_rows_share_is_found_again_when_somebody_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = make_batch()
    batch.page_tables[0, :NUM_ROWS] = alike(60)
    rows = Sharing(batch, [0, 128], PAGE)
    first = rows.arrays(decoding(), 10)
    assert first["shared_lens"][0].tolist() == [60 * PAGE] * NUM_ROWS + [0, 0]
    assert not first["shared_lens"][1].any(), "rows with a window share nothing"
    batch.page_tables[0, :NUM_ROWS] = alike(40)
    rows.apply(SOMEBODY)
    assert rows.arrays(decoding(), 8)["shared_lens"][0].tolist() == [40 * PAGE] * NUM_ROWS
    rows.apply(NOBODY)
    monkeypatch.setattr(sharing, "shared_groups", None)  # not asked for again
    assert rows.arrays(decoding(), 8)["shared_lens"][0].tolist() == [40 * PAGE] * NUM_ROWS


def guessed(num_tokens: int, lens: int, batch: PersistentBatch) -> dict[str, np.ndarray]:
    """The arrays of a step with so many tokens of each row, whose last one sees `lens` tokens."""
    packets = cast(Any, StepPackets.__new__(StepPackets))
    packets._sharing = Sharing(batch, [0, 128], PAGE)
    rows = np.repeat(ROWS, num_tokens)
    seen = lens - np.tile(np.arange(num_tokens)[::-1], NUM_ROWS)
    step: Any = SimpleNamespace(rows=rows, context_lens=seen, num_decodes=len(rows))
    arrays = {"token_rows": rows.astype(np.int64), "lens": seen.astype(np.int32)}
    arrays |= run_arrays(arrays["token_rows"], arrays["lens"])
    return cast(dict[str, np.ndarray], packets.with_shared(step, arrays))


def test_a_step_with_guesses_reads_each_history_once() -> None:
    """Also with long contexts, unless several sequences share a long prefix."""
    batch = make_batch()
    batch.page_tables[0, :NUM_ROWS] = alike(1)
    for lens in (SHARED_DRAFT_LEN, 90 * PAGE):
        arrays = guessed(5, lens, batch)
        assert "shared_lens" not in arrays
        assert arrays["num_runs"].tolist() == [NUM_ROWS]
        assert arrays["run_starts"][: NUM_ROWS + 1].tolist() == list(range(0, 41, 5))
    batch.page_tables[0, :NUM_ROWS] = alike(60)
    assert "run_starts" in guessed(5, SHARED_DRAFT_LEN, batch)
    arrays = guessed(5, 90 * PAGE, batch)
    assert "run_starts" not in arrays
    assert (arrays["shared_lens"][0] >= 60 * PAGE).all()


def test_rows_that_share_little_have_no_arrays_of_it() -> None:
    batch = make_batch()
    batch.page_tables[0, :NUM_ROWS] = alike(groups.MIN_PAGES)
    assert Sharing(batch, [0, 128], PAGE).arrays(decoding(), 8) == {}
