"""Builds a plan: the step's budget, and what was placed so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from manyroots.cache.cache import PrefixCache
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Extension
from manyroots.config import SchedulerSettings
from manyroots.ids import Row, StepId
from manyroots.scheduler.request import Request
from manyroots.scheduler.rows import NO_ROWS, Int64s, Rows
from manyroots.step import (
    AdapterIntent,
    Arrival,
    Bools,
    Copy,
    Int32s,
    KeepStored,
    NewPages,
    Plan,
    RowDraft,
)

Scalar = TypeVar("Scalar", bound=np.generic)

_INT32 = np.dtype(np.int32)
"""A dtype: numpy takes longer to find the one of a type."""


@dataclass(slots=True)
class Launched:
    """A step between its plan and its result, column by column."""

    step_id: StepId
    rows: Int64s
    num_tokens: Int64s | Int32s
    samples: Bools
    tenancies: Int64s
    """The tenancy of each row that the step was planned for."""
    total_tokens: int
    drafts: dict[int, Int32s] = field(default_factory=dict)
    """By row: the guesses among its tokens."""
    is_ahead: bool = False
    """Whether it was planned while another step ran."""
    may_draft: bool = False
    """Whether guesses were allowed when it was planned."""


class PlanBuilder:
    """What this step does so far and what it may still do."""

    __slots__ = (
        "_arrivals",
        "_budget",
        "_decoding",
        "_drafts",
        "_growth",
        "_placed",
        "_rows",
        "num_tokens_left",
        "step_id",
    )

    def __init__(self, step_id: StepId, budget: int, rows: Rows) -> None:
        self.step_id = step_id
        self.num_tokens_left = budget
        self._budget = budget
        self._rows = rows
        self._decoding = NO_ROWS
        self._placed: list[tuple[int, int, bool]] = []
        """Row, number of tokens, whether it samples."""
        self._arrivals: list[Arrival] = []
        self._growth: list[NewPages] = []
        self._drafts: list[RowDraft] = []

    @property
    def is_empty(self) -> bool:
        return not self._placed and len(self._decoding) == 0

    def decode(self) -> Int64s:
        """Place all rows that need one token and nothing of the cache; returns the decoding rows
        that need pages first. Call this before anything else is placed."""
        self._decoding, growing = self._rows.decode(self.num_tokens_left)
        self.num_tokens_left -= len(self._decoding)
        return growing

    def next_pages(self, rows: Int64s, units: list[npt.NDArray[np.intp]]) -> None:
        """Place the next token of rows that got one page each, by family."""
        places, rows_int32 = self._rows.next_pages(rows).astype(np.int32), rows.astype(np.int32)
        self._decoding = np.concatenate((self._decoding, rows))
        self.num_tokens_left -= len(rows)
        for family, pages in enumerate(units):
            self._growth.append(NewPages(family, rows_int32, places, pages.astype(np.int32)))

    def place(self, request: Request, lease: Lease, num_tokens: int, end: int) -> None:
        """The request computes `num_tokens` in this step, and `end` tokens in total."""
        row = request.row
        assert row is not None
        samples = self._rows.place(row, request, lease, end)
        self._placed.append((row, num_tokens, samples))
        self.num_tokens_left -= num_tokens

    def place_draft(self, row: Row, tokens: Int32s) -> None:
        """A decoding row computes its newest token, and these guesses after it."""
        num_tokens = 1 + len(tokens)
        self._rows.place_draft(row, num_tokens)
        self._placed.append((row, num_tokens, True))
        self._drafts.append(RowDraft(row, tokens))
        self.num_tokens_left -= num_tokens

    def placed_rows(self) -> set[int]:
        """Rows that already compute in this step."""
        return {*(row for row, _, _ in self._placed), *self._decoding.tolist()}

    def decoding_rows(self) -> list[int]:
        """Those of them that compute one token and have published nothing for it."""
        rows: list[int] = self._decoding.tolist()
        return rows

    def withdraw(self, row: Row) -> None:
        """Withdraw a decoding row's token, and the page that it got for it."""
        is_left = self._decoding != row
        if not is_left.all():
            self._decoding = self._decoding[is_left]
            self._rows.computed[row] -= 1
            self.num_tokens_left += 1
            self._growth = [_without(row, growth) for growth in self._growth]

    def arrive(self, request: Request, row: Row, lease: Lease, num_computed: int) -> None:
        """The request takes a row; everything known of it is sent."""
        submit = request.submit
        sampling = submit.sampling
        if sampling.prompt_logprobs is not None and not request.wants_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)
        self._arrivals.append(
            Arrival(  # by position: keyword arguments would take twice as long
                row,
                submit.request_id,
                request.known_tokens,
                request.num_prompt_tokens,
                num_computed,
                tuple([table.astype(_INT32) for table in lease.tables]),
                sampling,
                submit.seed,
                submit.stop_ids,
                None if request.hold is None else request.hold.slot,
                request.adapter_from,
            )
        )

    def grow(self, row: Row, lease: Lease, extension: Extension) -> None:
        """Extend a row's tables."""
        for family, (table, first) in enumerate(zip(lease.tables, extension, strict=True)):
            end = len(table)
            if end > first:
                places = np.arange(first, end, dtype=np.int32)
                rows = np.empty(end - first, np.int32)
                rows.fill(row)
                pages = table[first:].astype(np.int32)
                self._growth.append(NewPages(family, rows, places, pages))

    def to_plan(
        self,
        copies: tuple[Copy, ...],
        adapters: tuple[AdapterIntent, ...],
        *,
        waits: bool,
        num_guesses: int = 0,
        keeps: tuple[KeepStored, ...] = (),
        lent_units: tuple[int, ...] = (),
    ) -> tuple[Plan, Launched]:
        """The plan, and the record of it until its result arrives."""
        rows, count = self._decoding, len(self._decoding)
        samples, num_tokens_int32 = self._rows.trues[:count], self._rows.ones_int32[:count]
        num_tokens: Int64s | Int32s = self._rows.ones[:count]
        if self._placed:
            placed, counts, ends = zip(*self._placed, strict=True)
            rows, samples = _joined(rows, placed), _joined(samples, ends)
            num_tokens = num_tokens_int32 = _joined(num_tokens_int32, counts)
        rows_int32 = self._rows.to_int32(rows)
        plan = Plan(  # by position: keyword arguments would take twice as long
            self.step_id,
            tuple(self._arrivals),
            tuple(self._growth),
            rows_int32,
            num_tokens_int32,
            samples,
            tuple(self._drafts),
            num_guesses,
            copies,
            keeps,
            adapters,
            waits,
            lent_units,
        )
        total_tokens = self._budget - self.num_tokens_left
        tenancies = self._rows.tenancy[rows]
        drafts = {int(draft.row): draft.tokens for draft in self._drafts} if self._drafts else {}
        return plan, Launched(
            self.step_id, rows, num_tokens, samples, tenancies, total_tokens, drafts
        )


class Placer:
    """Places parts of requests in steps: shared by starting and continuing a request. Does not
    choose the next request, and does not handle a lack of room."""

    def __init__(self, settings: SchedulerSettings, cache: PrefixCache) -> None:
        self._most_tokens = settings.long_prefill_token_threshold
        self.most_step_tokens = settings.max_num_batched_tokens
        """Most tokens of one request in one step."""
        if self._most_tokens is not None:
            self.most_step_tokens = min(self.most_step_tokens, self._most_tokens)
        self._cache = cache
        self._clips = cache.has_states

    def chunk(self, request: Request, lease: Lease, computed: int, builder: PlanBuilder) -> int:
        """How many tokens a request may compute in this step, after those computed."""
        # Without those that a row still has: a row that samples has computed all of these.
        num_tokens = request.num_known_tokens - computed
        if num_tokens < 1:
            num_tokens = 1  # A decoding sequence has one token to compute, known by then or not.
        if num_tokens > builder.num_tokens_left:
            num_tokens = builder.num_tokens_left
        if self._most_tokens is not None:
            num_tokens = min(num_tokens, self._most_tokens)
        return self._cache.clip(lease, computed, num_tokens) if self._clips else num_tokens

    def place(
        self, request: Request, lease: Lease, computed: int, num: int, builder: PlanBuilder
    ) -> None:
        """The request has what it needs for `num` more tokens: they are computed in this step."""
        end = computed + num
        self._cache.announce(lease, request.tokens, end, builder.step_id)
        builder.place(request, lease, num, end)


def _without(row: Row, growth: NewPages) -> NewPages:
    is_left = growth.rows != row
    columns = (growth.rows[is_left], growth.places[is_left], growth.pages[is_left])
    return NewPages(growth.family, *columns)


def _joined(column: npt.NDArray[Scalar], more: Sequence[int]) -> npt.NDArray[Scalar]:
    """A column with more entries appended; faster than numpy if these are a tuple."""
    count = len(column)
    joined = np.empty(count + len(more), column.dtype)
    joined[:count] = column
    joined[count:] = more
    return joined
