"""The persistent batch: what the runner remembers of each row between steps.

In: the deltas of a plan. Out: the flat arrays a forward pass needs. Numpy throughout and no loop
over the rows of a step: only arrivals cost Python. Rows with the same adapter are laid out
together, so that their tokens are one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manyroots.ids import NO_ADAPTER
from manyroots.step import Arrival, Int32s, Plan

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, flattened: sequences with a single token first, then the longer ones; within
    both those of the base model first, then by adapter slot."""

    rows: Int32s
    """Row of each sequence, in this order."""
    tokens: Int64s
    positions: Int64s
    query_starts: Int64s
    """Sequence i has flat tokens [query_starts[i], query_starts[i + 1])."""
    context_lens: Int64s
    """Tokens that a sequence's last token sees, itself included."""
    num_decodes: int
    page_table: Int32s
    slot_pages: Int64s
    slot_offsets: Int64s
    token_slots: Int64s | None
    """The adapter slot of each token, or NO_ADAPTER; None if no token has one."""
    sampling: Int64s
    """Which sequences sample, as indices into `rows`, ascending."""
    sampling_order: Int64s
    """For each sampling row of the plan, in its order, which of `sampling` it is."""


class PersistentBatch:
    """Tokens, progress and page tables by row."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, page_size: int) -> None:
        self._page_size = page_size
        # Zeroed memory is not touched until it is used, so long limits cost nothing up front.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_computed = np.zeros(max_num_seqs, np.int64)
        self._adapter_slot = np.full(max_num_seqs, NO_ADAPTER, np.int64)
        self._adapter_from = np.zeros(max_num_seqs, np.int64)
        self._page_table = np.zeros((max_num_seqs, -(-max_model_len // page_size)), np.int32)

    def apply(self, plan: Plan) -> None:
        """Take in what changed since the last plan."""
        for arrival in plan.arrivals:
            self._arrive(arrival)
        for growth in plan.new_pages:
            self._page_table[growth.rows, growth.places] = growth.pages

    def _arrive(self, arrival: Arrival) -> None:
        row, count = arrival.row, len(arrival.tokens)
        self.tokens[row, :count] = arrival.tokens
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = arrival.num_prompt_tokens
        self._num_computed[row] = arrival.num_computed_tokens
        slot = arrival.adapter_slot
        self._adapter_slot[row] = NO_ADAPTER if slot is None else slot
        self._adapter_from[row] = arrival.adapter_from
        table = arrival.page_tables[0]
        self._page_table[row, : len(table)] = table

    def inputs(self, plan: Plan) -> StepInputs:
        """Lay a step out flat, and count its tokens as computed."""
        slots = self._adapter_slot[plan.rows]
        # By the adapter that acts: before it is invoked, an aLoRA's tokens are the base model's.
        last = self._num_computed[plan.rows] + plan.num_tokens - 1
        acting = np.where(last >= self._adapter_from[plan.rows], slots, NO_ADAPTER)
        order = np.lexsort((acting, plan.num_tokens != 1))  # stable; the last key counts most
        rows, counts = plan.rows[order], plan.num_tokens[order].astype(np.int64)
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        begin = self._num_computed[rows]
        context_lens = begin + counts

        flat_rows = np.repeat(rows, counts)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - begin, counts)
        pages = self._page_table[flat_rows, positions // self._page_size]
        max_pages = -(-int(context_lens.max()) // self._page_size)
        self._num_computed[rows] = context_lens

        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        sampled = place[plan.samples]
        return StepInputs(
            rows=rows,
            tokens=self.tokens[flat_rows, positions].astype(np.int64),
            positions=positions,
            query_starts=starts,
            context_lens=context_lens,
            num_decodes=int(np.count_nonzero(counts == 1)),
            page_table=self._page_table[rows, :max_pages],
            slot_pages=pages.astype(np.int64),
            slot_offsets=positions % self._page_size,
            token_slots=self._token_slots(flat_rows, positions, slots),
            sampling=np.sort(sampled),
            sampling_order=np.argsort(np.argsort(sampled)),
        )

    def _token_slots(self, flat_rows: Int32s, positions: Int64s, slots: Int64s) -> Int64s | None:
        if not len(slots) or slots.max() == NO_ADAPTER:
            return None
        acts = positions >= self._adapter_from[flat_rows]
        return np.where(acts, self._adapter_slot[flat_rows], NO_ADAPTER)

    def append(self, rows: Int32s, tokens: Int32s) -> None:
        """Sampled tokens become known."""
        self.tokens[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1

    def num_output_tokens(self, rows: Int32s) -> Int64s:
        return self.num_tokens[rows] - self.num_prompt_tokens[rows]

    def known(self, row: int) -> Int32s:
        return self.tokens[row, : self.num_tokens[row]]
