"""The last steps of an engine, in a ring of fixed size.

Takes plans as they are launched and results as they come; gives the steps as the page shows them.
Noting a step costs a few microseconds and takes no memory: what it needs of a row is copied into
columns that are made once. It keeps neither tokens nor prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from manyroots.ids import AdapterDigest, Tier
from manyroots.snapshot import BASE_MODEL, MAX_STEPS, StepExplained, StepRow, StepView
from manyroots.step import Copy, LoadAdapter, Plan, StepResult

SIZE = MAX_STEPS + 12
"""Some more than are shown, since two steps may be under way."""
MAX_ROWS = 512
"""Rows of one step that are noted one by one."""
MAX_NOTED = 16
"""Copies and loads of one step that are noted one by one."""
MAX_ADAPTERS = 65_536
"""Adapters that get a number of their own; those that come later share the last one."""


class StepRing:
    """Notes steps by their number: step k replaces step k - SIZE."""

    def __init__(self, max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self._last_end_s = 0.0
        self.digests: list[AdapterDigest] = []
        """Adapters by their number."""
        self._numbers: dict[AdapterDigest, int] = {}
        self._number_in_slot: dict[int, int] = {}
        self.loads: dict[int, int] = {}
        """By the adapter's number: loads to the device since start."""
        # What sits on each row of the batch.
        self._request_of = np.zeros(max_num_seqs, np.int64)
        self._adapter_of = np.full(max_num_seqs, BASE_MODEL, np.int32)
        self._left_of = np.zeros(max_num_seqs, np.int64)
        """Known tokens that no plan has computed yet."""
        self._num_left = 0
        # One entry for each step of the ring.
        self._step_ids = [0] * SIZE
        self._begins = [0.0] * SIZE
        self._times = [(0.0, 0.0)] * SIZE
        self._counts = [(0, 0, 0, 0, 0, 0, False)] * SIZE
        self._graphs = [False] * SIZE
        self._copies: list[tuple[tuple[str, str, int], ...]] = [()] * SIZE
        self._loads: list[tuple[tuple[int, str], ...]] = [()] * SIZE
        self._arrived: list[tuple[int, ...]] = [()] * SIZE
        width = min(max_num_seqs, MAX_ROWS)
        self._width = width
        self._requests = np.zeros((SIZE, width), np.int64)
        self._adapters = np.zeros((SIZE, width), np.int32)
        self._tokens = np.zeros((SIZE, width), np.int32)
        self._prompts = np.zeros((SIZE, width), np.int32)

    def launched(self, plan: Plan) -> None:
        """A step is on its way."""
        at = plan.step_id % SIZE
        if plan.adapters:
            self._note_loads(plan, at)
        else:
            self._loads[at] = ()
        self._copies[at] = _copied(plan.copies) if plan.copies else ()
        arrivals = plan.arrivals
        if arrivals:
            self._seat(plan)
            self._arrived[at] = tuple([a.request_id for a in arrivals[: self._width]])
        else:
            self._arrived[at] = ()
        rows, num_tokens = plan.rows, plan.num_tokens
        count = len(rows)
        num_prompt = 0
        total = count
        if count:
            few = rows if count <= self._width else rows[: self._width]
            end = len(few)
            self._requests[at, :end] = self._request_of[few]
            self._adapters[at, :end] = self._adapter_of[few]
            if self._num_left:
                left = self._left_of[rows]
                prompts = np.minimum(left, num_tokens)
                self._left_of[rows] = left - prompts
                num_prompt = int(prompts.sum())
                self._num_left -= num_prompt
                total = int(num_tokens.sum())
                self._tokens[at, :end] = num_tokens[:end]
                self._prompts[at, :end] = prompts[:end]
            else:
                self._tokens[at, :end] = 1
                self._prompts[at, :end] = 0
        num_units = sum(units for _, _, units in self._copies[at])
        self._counts[at] = (
            count, num_prompt, total - num_prompt, len(arrivals), num_units, len(self._loads[at]),
            plan.waits,
        )  # fmt: skip
        self._graphs[at] = False
        self._times[at] = (0.0, 0.0)
        self._begins[at] = self._clock()
        self._step_ids[at] = plan.step_id

    def done(self, result: StepResult) -> None:
        """A step has given its result."""
        at = result.step_id % SIZE
        now = self._clock()
        begin = self._begins[at]
        last, self._last_end_s = self._last_end_s, now
        self._times[at] = (begin, now - (begin if begin > last else last))
        self._graphs[at] = result.is_graph

    def since(self, step_id: int) -> list[StepView]:
        """The steps after this one, oldest first: at most as many as are shown."""
        known = sorted(number for number in self._step_ids if number > step_id)
        return [self._view(number) for number in known[-MAX_STEPS:]]

    def explain(self, step_id: int) -> StepExplained | None:
        """One step row by row; None if it is not in the ring (any more)."""
        at = step_id % SIZE
        if step_id < 1 or self._step_ids[at] != step_id:
            return None
        count = self._counts[at][0]
        end = min(count, self._width)
        arrived = set(self._arrived[at])
        columns = (self._requests, self._adapters, self._tokens, self._prompts)
        rows = [
            StepRow(request, adapter, tokens, prompt, request in arrived)
            for request, adapter, tokens, prompt in zip(
                *(column[at, :end].tolist() for column in columns), strict=True
            )
        ]
        return StepExplained(step_id, rows, count, list(self._copies[at]), list(self._loads[at]))

    def number_of(self, digest: AdapterDigest) -> int:
        """An adapter's number, the same for as long as the engine lives."""
        number = self._numbers.get(digest)
        if number is None:
            number = min(len(self.digests), MAX_ADAPTERS - 1)
            if number == len(self.digests):
                self.digests.append(digest)
            self._numbers[digest] = number
            if len(self._numbers) > 2 * MAX_ADAPTERS:
                self._numbers = {known: i for i, known in enumerate(self.digests)}
        return number

    def _view(self, step_id: int) -> StepView:
        at = step_id % SIZE
        count, num_prompt, num_decode, num_arrivals, num_units, num_loads, waits = self._counts[at]
        begin, seconds = self._times[at]
        # The base model's number is -1.
        adapters = np.bincount(self._adapters[at, : min(count, self._width)] + 1)
        numbers = adapters.nonzero()[0]
        return StepView(
            step_id,
            round((begin or self._begins[at]) - self._start_s, 4),
            round(1000 * seconds, 3),
            count,
            num_prompt,
            num_decode,
            0,  # speculation would draft here
            num_arrivals,
            num_units,
            num_loads,
            self._graphs[at],
            waits,
            list(zip((numbers - 1).tolist(), adapters[numbers].tolist(), strict=True)),
        )

    def _seat(self, plan: Plan) -> None:
        for arrival in plan.arrivals:
            row, slot = arrival.row, arrival.adapter_slot
            self._request_of[row] = arrival.request_id
            number = BASE_MODEL if slot is None else self._number_in_slot.get(slot, BASE_MODEL)
            self._adapter_of[row] = number
            left = len(arrival.tokens) - arrival.num_computed_tokens
            self._num_left += left - int(self._left_of[row])
            self._left_of[row] = left

    def _note_loads(self, plan: Plan, at: int) -> None:
        noted: list[tuple[int, str]] = []
        for intent in plan.adapters:
            if isinstance(intent, LoadAdapter):
                number = self.number_of(intent.digest)
                if intent.target is not None:
                    self._number_in_slot[intent.target.slot] = number
                    self.loads[number] = self.loads.get(number, 0) + 1
                noted.append((number, intent.source.value))
        self._loads[at] = tuple(noted[:MAX_NOTED])


def _copied(copies: tuple[Copy, ...]) -> tuple[tuple[str, str, int], ...]:
    """Units by where they come from and go to."""
    counts: dict[tuple[Tier, Tier], int] = {}
    for copy in copies:
        units = max(len(copy.source_units), len(copy.target_units))
        way = copy.source, copy.target
        counts[way] = counts.get(way, 0) + units
    return tuple((source.value, target.value, n) for (source, target), n in counts.items())
