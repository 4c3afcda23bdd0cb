"""The last steps of an engine, in a ring of fixed size.

Takes plans as they are launched and results as they come; gives the steps as the page shows them.
Noting a step costs about a microsecond: it keeps the plan's own columns of rows and counts, which
are never changed, and neither tokens nor prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from manyroots.ids import AdapterDigest, Tier
from manyroots.messages import Int64s
from manyroots.snapshot import BASE_MODEL, MAX_STEPS, StepExplained, StepRow, StepView
from manyroots.step import Copy, Int32s, LoadAdapter, Plan, StepResult

SIZE = MAX_STEPS + 12
"""Some more than are shown, since two steps may be under way."""
MAX_ROWS = 512
"""Rows of one step that are explained one by one."""
MAX_NOTED = 16
"""Copies and loads of one step that are noted one by one."""
MAX_ADAPTERS = 65_536
"""Adapters that get a number of their own; those that come later share the last one."""


class _Noted(NamedTuple):
    """A step when it was launched. Arrays are those of the plan, and those of the ring as they were
    then: nothing is copied for a step in which no request begins."""

    step_id: int
    begin_s: float
    rows: Int32s
    num_tokens: Int32s
    requests: Int64s
    """By row of the batch."""
    adapters: Int32s
    prompts: Int64s | None
    """For each of `rows`, how many of its tokens are of its prompt; None if none is."""
    arrived: tuple[int, ...]
    num_arrivals: int
    copies: tuple[tuple[str, str, int], ...]
    loads: tuple[tuple[int, str], ...]
    waits: bool


_NOTHING = np.zeros(0, np.int32)
_NONE = _Noted(
    0, 0.0, _NOTHING, _NOTHING, np.zeros(0, np.int64), _NOTHING, None, (), 0, (), (), False
)


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
        # What sits on each row of the batch. Replaced when requests arrive, never changed: steps
        # that were noted before keep what it was then.
        self._request_of = np.zeros(max_num_seqs, np.int64)
        self._adapter_of = np.full(max_num_seqs, BASE_MODEL, np.int32)
        self._left_of = np.zeros(max_num_seqs, np.int64)
        """Known tokens that no plan has computed yet."""
        self._num_left = 0
        self._noted = [_NONE] * SIZE
        self._done = [(0, 0.0, False)] * SIZE
        """The step's number, its seconds, and whether it was a graph."""

    def launched(self, plan: Plan) -> None:
        """A step is on its way."""
        loads = self._note_loads(plan) if plan.adapters else ()
        copies = _copied(plan.copies) if plan.copies else ()
        arrivals = plan.arrivals
        arrived: tuple[int, ...] = ()
        if arrivals:
            arrived = tuple([a.request_id for a in arrivals[:MAX_ROWS]])
            self._seat(plan)
        prompts = None
        if self._num_left:
            left = self._left_of[plan.rows]
            prompts = np.minimum(left, plan.num_tokens)
            self._left_of[plan.rows] = left - prompts
            self._num_left -= int(prompts.sum())
        self._noted[plan.step_id % SIZE] = _Noted(
            plan.step_id, self._clock(), plan.rows, plan.num_tokens, self._request_of,
            self._adapter_of, prompts, arrived, len(arrivals), copies, loads, plan.waits,
        )  # fmt: skip

    def done(self, result: StepResult) -> None:
        """A step has given its result."""
        now, last = self._clock(), self._last_end_s
        self._last_end_s = now
        at = result.step_id % SIZE
        begin = self._noted[at].begin_s
        seconds = now - (begin if begin > last else last)
        self._done[at] = (result.step_id, seconds, result.is_graph)

    def since(self, step_id: int) -> list[StepView]:
        """The steps after this one, oldest first: at most as many as are shown."""
        known = sorted(noted.step_id for noted in self._noted if noted.step_id > step_id)
        return [self._view(number) for number in known[-MAX_STEPS:]]

    def explain(self, step_id: int) -> StepExplained | None:
        """One step row by row; None if it is not in the ring (any more)."""
        noted = self._noted[step_id % SIZE]
        if step_id < 1 or noted.step_id != step_id:
            return None
        rows, arrived = noted.rows[:MAX_ROWS], set(noted.arrived)
        prompts = np.zeros(len(rows), np.int64) if noted.prompts is None else noted.prompts
        columns = (
            noted.requests[rows],
            noted.adapters[rows],
            noted.num_tokens[:MAX_ROWS],
            prompts[:MAX_ROWS],
        )
        explained = [
            StepRow(request, adapter, tokens, prompt, request in arrived)
            for request, adapter, tokens, prompt in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]
        return StepExplained(
            step_id, explained, len(noted.rows), list(noted.copies), list(noted.loads)
        )

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
        noted = self._noted[step_id % SIZE]
        done_id, seconds, is_graph = self._done[step_id % SIZE]
        is_done = done_id == step_id
        num_prompt = 0 if noted.prompts is None else int(noted.prompts.sum())
        # The base model's number is -1.
        adapters = np.bincount(noted.adapters[noted.rows] + 1)
        numbers = adapters.nonzero()[0]
        return StepView(
            step_id,
            round(noted.begin_s - self._start_s, 4),
            max(round(1000 * seconds, 3), 0.001) if is_done else 0.0,
            len(noted.rows),
            num_prompt,
            int(noted.num_tokens.sum()) - num_prompt,
            0,  # speculation would draft here
            noted.num_arrivals,
            sum(units for _, _, units in noted.copies),
            len(noted.loads),
            is_graph and is_done,
            noted.waits,
            list(zip((numbers - 1).tolist(), adapters[numbers].tolist(), strict=True)),
        )

    def _seat(self, plan: Plan) -> None:
        self._request_of, self._adapter_of = self._request_of.copy(), self._adapter_of.copy()
        for arrival in plan.arrivals:
            row, slot = arrival.row, arrival.adapter_slot
            self._request_of[row] = arrival.request_id
            number = BASE_MODEL if slot is None else self._number_in_slot.get(slot, BASE_MODEL)
            self._adapter_of[row] = number
            left = len(arrival.tokens) - arrival.num_computed_tokens
            self._num_left += left - int(self._left_of[row])
            self._left_of[row] = left

    def _note_loads(self, plan: Plan) -> tuple[tuple[int, str], ...]:
        noted: list[tuple[int, str]] = []
        for intent in plan.adapters:
            if isinstance(intent, LoadAdapter):
                number = self.number_of(intent.digest)
                if intent.target is not None:
                    self._number_in_slot[intent.target.slot] = number
                    self.loads[number] = self.loads.get(number, 0) + 1
                noted.append((number, intent.source.value))
        return tuple(noted[:MAX_NOTED])


def _copied(copies: tuple[Copy, ...]) -> tuple[tuple[str, str, int], ...]:
    """Units by where they come from and go to."""
    counts: dict[tuple[Tier, Tier], int] = {}
    for copy in copies:
        units = max(len(copy.source_units), len(copy.target_units))
        way = copy.source, copy.target
        counts[way] = counts.get(way, 0) + units
    return tuple((source.value, target.value, n) for (source, target), n in counts.items())
