"""The persistent batch: what the runner remembers of each row between steps.

In: the deltas of a plan. Out: the `StepInputs` of a forward pass. Numpy throughout and no loop
over the rows of a step: only arrivals cost Python. Rows with the same adapter are laid out
together, so that their tokens are one product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manyroots.ids import NO_ADAPTER
from manyroots.runner.inputs import Int64s, StepInputs
from manyroots.step import Arrival, Int32s, Plan


class PersistentBatch:
    """Tokens, progress, page tables and states by row."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        num_paged: int = 1,
        spare_units: Sequence[int] = (),
    ) -> None:
        """`num_paged`: families of pages, which come first. `spare_units`: of each family of
        states, the spare unit."""
        self._page_size, self._num_paged = page_size, num_paged
        # Zeroed memory is not touched until it is used, so long limits cost nothing up front.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_computed = np.zeros(max_num_seqs, np.int64)
        self._num_guesses = np.zeros(max_num_seqs, np.int64)
        """Of the step that is laid out next."""
        self._adapter_slot = np.full(max_num_seqs, NO_ADAPTER, np.int64)
        self._adapter_from = np.zeros(max_num_seqs, np.int64)
        max_pages = -(-max_model_len // page_size)
        self.page_tables = np.zeros((num_paged, max_num_seqs + 1, max_pages), np.int32)
        """By family and row; entry i is the page of the tokens from i * page_size on. Those in
        front of a window are whatever they were. The row after the last is spare."""
        self.units = np.zeros((len(spare_units), max_num_seqs + 1), np.int32)
        """By family of states and row: where its state is. The row after the last is spare."""
        self.units[:, -1] = spare_units

    def apply(self, plan: Plan) -> None:
        """Take in what changed since the last plan."""
        for arrival in plan.arrivals:
            self._arrive(arrival)
        for growth in plan.new_pages:
            if growth.family < self._num_paged:
                self.page_tables[growth.family, growth.rows, growth.places] = growth.pages
            else:
                self.units[growth.family - self._num_paged, growth.rows] = growth.pages
        for draft in plan.drafts:
            known, count = int(self.num_tokens[draft.row]), len(draft.tokens)
            self.tokens[draft.row, known : known + count] = draft.tokens
            self._num_guesses[draft.row] = count

    def _arrive(self, arrival: Arrival) -> None:
        row, count = arrival.row, len(arrival.tokens)
        self.tokens[row, :count] = arrival.tokens
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = arrival.num_prompt_tokens
        self._num_computed[row] = arrival.num_computed_tokens
        self._num_guesses[row] = 0  # the step that had them may have failed before this
        slot = arrival.adapter_slot
        self._adapter_slot[row] = NO_ADAPTER if slot is None else slot
        self._adapter_from[row] = arrival.adapter_from
        count = self._num_paged
        for mine, table in zip(self.page_tables, arrival.page_tables[:count], strict=True):
            mine[row, : len(table)] = table
        for units, table in zip(self.units, arrival.page_tables[count:], strict=True):
            [units[row]] = table

    def inputs(self, plan: Plan) -> StepInputs:
        """Lay a step out flat, and count its tokens as computed."""
        slots = self._adapter_slot[plan.rows]
        order, every = self._order(plan, slots), np.arange(len(slots) + 1)
        rows, counts = plan.rows[order], plan.num_tokens[order].astype(np.int64)
        begin = self._num_computed[rows]
        context_lens = begin + counts
        self._num_computed[rows] = context_lens
        num_decodes = int(np.count_nonzero(counts == 1))
        if num_decodes == len(rows):
            starts, flat_rows, positions = every, rows, begin
        else:
            starts = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(counts, out=starts[1:])
            flat_rows = np.repeat(rows, counts)
            positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - begin, counts)

        # Of a row with guesses, a sample after its newest token and one after each of them.
        num_samples = plan.samples[order].astype(np.int64)
        if plan.drafts:
            num_samples += self._num_guesses[rows]
            self._num_guesses[rows] = 0
        firsts = np.cumsum(num_samples) - num_samples
        place = np.empty(len(order), np.int64)
        place[order] = firsts
        if plan.drafts:
            sampling = np.repeat(every[:-1], num_samples)
            guesses = np.arange(len(sampling)) - firsts[sampling]
            sampled_at = starts[sampling + 1] - num_samples[sampling] + guesses
        else:
            sampling = num_samples.nonzero()[0]
            guesses = np.zeros(len(sampling), np.int64)
            sampled_at = starts[sampling + 1] - 1
        return StepInputs(
            rows=rows,
            token_rows=flat_rows,
            tokens=self.tokens[flat_rows, positions].astype(np.int64),
            positions=positions,
            query_starts=starts,
            context_lens=context_lens,
            num_decodes=num_decodes,
            pages=self.page_tables[:, flat_rows, positions // self._page_size],
            offsets=positions % self._page_size,
            units=self.units[:, rows],
            token_slots=self._token_slots(flat_rows, positions, slots),
            sampling=sampling,
            sampling_order=place[plan.samples],
            sampled_at=sampled_at,
            guesses=guesses,
        )

    def _order(self, plan: Plan, slots: Int64s) -> Int64s:
        """Of the plan's rows, as they are laid out; `slots` are their adapters'."""
        is_longer = plan.num_tokens != 1
        if not len(slots) or slots.max() == NO_ADAPTER:
            return np.argsort(is_longer, kind="stable")
        # By the adapter that acts: before it is invoked, an aLoRA's tokens are the base model's.
        last = self._num_computed[plan.rows] + plan.num_tokens - 1
        acting = np.where(last >= self._adapter_from[plan.rows], slots, NO_ADAPTER)
        return np.lexsort((acting, is_longer))  # stable; the last key counts most

    def _token_slots(self, flat_rows: Int32s, positions: Int64s, slots: Int64s) -> Int64s | None:
        if not len(slots) or slots.max() == NO_ADAPTER:
            return None
        acts = positions >= self._adapter_from[flat_rows]
        return np.where(acts, self._adapter_slot[flat_rows], NO_ADAPTER)

    def num_computed(self, rows: Int64s) -> Int64s:
        return self._num_computed[rows]

    def computed(self, rows: Int64s, counts: Int64s) -> None:
        """A step that is laid out computes so many tokens of each row, guesses included."""
        self._num_computed[rows] += counts
        self._num_guesses[rows] = 0

    def slots(self, rows: Int64s, positions: Int64s) -> tuple[Int32s, Int64s]:
        """The pages by family, and the places within them, of these tokens."""
        places = positions // self._page_size
        return self.page_tables[:, rows, places], positions - places * self._page_size

    def may_change_adapter(self, rows: Int32s) -> bool:
        """Whether a token of one of these rows may come before its adapter is invoked."""
        return bool((self._adapter_from[rows] > self.num_tokens[rows] - 1).any())

    def append(self, rows: Int32s, token: int) -> Int64s:
        """Each of these rows has one token more; gives their places."""
        places = self.num_tokens[rows]
        self.tokens[rows, places] = token
        self.num_tokens[rows] = places + 1
        return places

    def accept(self, rows: Int64s, num_right: Int64s, newest: Int32s) -> None:
        """A step checked guesses of these rows, which lie after the known tokens: so many of them
        are right, and one token follows, which alone is not computed."""
        places = self.num_tokens[rows] + num_right
        self.tokens[rows, places] = newest
        self.num_tokens[rows] = places + 1
        self._num_computed[rows] = places

    def go_back(self, row: int, num_right: int) -> None:
        """A row whose guesses were accepted has the state from before their step again: its tokens
        since are not computed."""
        self._num_computed[row] -= num_right + 1

    def num_output_tokens(self, rows: Int32s) -> Int64s:
        return self.num_tokens[rows] - self.num_prompt_tokens[rows]

    def known(self, row: int) -> Int32s:
        return self.tokens[row, : self.num_tokens[row]]
