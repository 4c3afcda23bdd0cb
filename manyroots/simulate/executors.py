"""What stands in for the model: tokens from the trace, with or without a memory of pages.

`CheckedExecutor` keeps what every place of every page holds and reads each row's history back
through its page table, so that any page given wrongly raises; it costs time for every token of
context. `UncheckedExecutor` answers at once, for sizing runs over long prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from manyroots.cache.families.family import Family
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.ids import CopyId, RequestId, Row, Tier
from manyroots.runner.fake import FakeRunner
from manyroots.simulate.segments import VOCAB_SIZE
from manyroots.simulate.transfers import TransferModel
from manyroots.step import Copy, CopyDone, Plan, StepResult

Replies = Mapping[RequestId, list[int]]
"""What each sequence says. The executor reads it; the submitter writes it."""


class SimulatedExecutor(Protocol):
    """Carries out a step, at once."""

    fail_next: str | None
    """Makes the next step raise RuntimeError with this, once it has taken in its deltas: rows must
    not keep tables of sequences that are gone, or a later step would write into them."""

    def execute(self, plan: Plan) -> StepResult: ...


def reply_token(replies: Replies, request_id: RequestId, index: int) -> int:
    """Token number `index` of a reply. After its end a step may still sample one, planned before
    the end was known; the scheduler drops it, so that any token will do."""
    reply = replies[request_id]
    return reply[index] if index < len(reply) else 0


class CheckedExecutor(FakeRunner):
    """The fake runner's memory, with the trace's tokens in place of the fake model's."""

    def __init__(
        self,
        replies: Replies,
        transfers: TransferModel,
        *,
        page_size: int,
        families: tuple[Family, ...] = (FULL_ATTENTION,),
        is_held: Callable[[int, int], bool] | None = None,
    ) -> None:
        super().__init__(
            page_size=page_size,
            vocab_size=VOCAB_SIZE,
            families=families,
            finish_copies=transfers.ended_copies,
            finish_loads=transfers.ended_loads,
            is_held=is_held,
        )
        self._replies = replies

    def next_token(self, sequence: Any) -> int:
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        return reply_token(self._replies, RequestId(sequence.request_id), num_output)


class UncheckedExecutor:
    """Knows of each row only whose it is and how much it has said, and what storage has."""

    def __init__(self, replies: Replies, transfers: TransferModel) -> None:
        self._replies = replies
        self._transfers = transfers
        self._under_way: dict[CopyId, Copy] = {}
        self._stored: set[tuple[int, bytes]] = set()
        self._rows: dict[int, tuple[RequestId, int]] = {}
        self.fail_next: str | None = None

    def execute(self, plan: Plan) -> StepResult:
        for arrival in plan.arrivals:
            num_output = len(arrival.tokens) - arrival.num_prompt_tokens
            self._rows[int(arrival.row)] = (arrival.request_id, num_output)
        for copy in plan.copies:
            if copy.source is not copy.target:
                self._under_way[copy.copy_id] = copy
        if self.fail_next is not None:
            reason, self.fail_next = self.fail_next, None
            raise RuntimeError(reason)
        tokens, num_accepted = [], {}
        drafts = {int(draft.row): draft.tokens.tolist() for draft in plan.drafts}
        for row in plan.rows[plan.samples].tolist():
            request_id, num_output = self._rows[row]
            if row in drafts:
                num_right = self._num_right(request_id, num_output, drafts[row])
                num_accepted[Row(row)] = num_right
                num_output += num_right
            tokens.append(reply_token(self._replies, request_id, num_output))
            self._rows[row] = (request_id, num_output + 1)
        return StepResult(
            plan.step_id,
            np.array(tokens, np.int32),
            num_accepted=num_accepted,
            copies=self._end_copies(),
            adapters=tuple(self._transfers.ended_loads([])),
        )

    def _num_right(self, request_id: RequestId, num_output: int, draft: list[int]) -> int:
        """How many guesses in a row are what the sequence says."""
        said = enumerate(draft, num_output)
        are_right = [reply_token(self._replies, request_id, at) == token for at, token in said]
        return [*are_right, False].index(False)

    def _end_copies(self) -> tuple[CopyDone, ...]:
        if not self._under_way:
            return ()
        done = []
        for copy, is_good in self._transfers.ended_copies(list(self._under_way.values())):
            del self._under_way[copy.copy_id]
            units = [(copy.family, digest) for digest in copy.hashes]
            arrived = np.full(len(units) or len(copy.target_units), is_good, np.bool_)
            if copy.source is Tier.STORAGE:
                arrived &= [unit in self._stored for unit in units]
            elif copy.target is Tier.STORAGE and is_good:
                self._stored.update(units)
            error = None if is_good else "the copy was made to fail"
            done.append(CopyDone(copy.copy_id, arrived, error))
        return tuple(done)
