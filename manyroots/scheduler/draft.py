"""A plan being drawn up: one budget for the step, and the parts placed so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from manyroots.cache.cache import Extension
from manyroots.cache.lease import Lease
from manyroots.ids import Row, StepId
from manyroots.scheduler.request import Request
from manyroots.step import AdapterIntent, Arrival, Copy, NewPages, Plan


class Part(NamedTuple):
    """One sequence's share of a step. A tuple, because a step makes hundreds."""

    request: Request
    row: Row
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Draft:
    """What this step does so far and what it may still do."""

    step_id: StepId
    num_tokens_left: int
    parts: list[Part] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    new_pages: list[NewPages] = field(default_factory=list)

    def place(self, request: Request, num_tokens: int) -> None:
        """The request computes `num_tokens` in this step."""
        samples = num_tokens == request.num_tokens_to_compute
        row = request.row
        assert row is not None
        self.parts.append(Part(request, row, num_tokens, samples))
        self.num_tokens_left -= num_tokens
        request.num_computed_tokens += num_tokens
        request.num_in_flight += 1
        if samples:
            request.num_pending_tokens += 1

    def arrive(self, request: Request, row: Row, lease: Lease) -> None:
        """The request takes a row, with everything known of it."""
        submit = request.submit
        sampling = submit.sampling
        if sampling.prompt_logprobs is not None and not request.wants_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)
        self.arrivals.append(
            Arrival(
                row=row,
                request_id=submit.request_id,
                tokens=request.tokens.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=lease.num_cached_tokens,
                page_tables=tuple(np.array(table, np.int32) for table in lease.tables),
                sampling=sampling,
                seed=submit.seed,
                stop_ids=submit.stop_ids,
                adapter_slot=None if request.hold is None else request.hold.slot,
                adapter_from=request.adapter_from,
            )
        )

    def grow(self, row: Row, extension: Extension) -> None:
        """A row's tables get longer."""
        for family, (first, units) in enumerate(zip(extension.first, extension.units, strict=True)):
            if len(units):
                self.new_pages.append(NewPages(row, family, first, np.array(units, np.int32)))

    def decode(self, request: Request, row: Row) -> None:
        """As `place`, for the commonest case: a running request's one next token."""
        self.parts.append(Part(request, row, 1, True))
        self.num_tokens_left -= 1
        request.num_computed_tokens += 1
        request.num_in_flight += 1
        request.num_pending_tokens += 1

    def to_plan(
        self, copies: tuple[Copy, ...], adapters: tuple[AdapterIntent, ...], *, waits: bool
    ) -> Plan:
        return Plan(
            step_id=self.step_id,
            arrivals=tuple(self.arrivals),
            new_pages=tuple(self.new_pages),
            rows=np.array([part.row for part in self.parts], np.int32),
            num_tokens=np.array([part.num_tokens for part in self.parts], np.int32),
            samples=np.array([part.samples for part in self.parts], np.bool_),
            copies=copies,
            adapters=adapters,
            waits=waits,
        )
