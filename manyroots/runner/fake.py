"""A runner without a model: deterministic tokens, and a memory that can be wrong.

For every slot of every page it keeps a digest of the token written there and of all before it, as
keys and values depend on both, and reads a row's history back *through its page table*, as
attention would. Any mistake of the decide half (a page of another request, one not filled yet, one
freed too early) makes a digest wrong, and the step raises. For tests; needs no torch.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from manyroots.ids import RequestId
from manyroots.step import Arrival, Int32s, Plan, StepResult


@dataclass(slots=True)
class _Sequence:
    request_id: RequestId
    tokens: list[int]
    num_computed_tokens: int
    table: list[int]
    stop_ids: frozenset[int]
    num_prompt_tokens: int
    min_tokens: int
    digests: list[int]
    """Entry i stands for tokens[: i + 1]."""


class FakeRunner:
    """Computes a step at once, in the caller's thread."""

    def __init__(self, *, num_pages: int, page_size: int, vocab_size: int) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._memory: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        """Digest in each slot of each page; None where nothing was ever written."""
        self._sequences: dict[int, _Sequence] = {}
        self.fail_next: str | None = None
        """Set to make the next step raise, as a kernel fault would."""

    def launch(self, plan: Plan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        self._sequences.clear()

    def execute(self, plan: Plan) -> StepResult:
        for arrival in plan.arrivals:
            self._sequences[int(arrival.row)] = _arrive(arrival)
        for growth in plan.new_pages:
            sequence = self._sequences[int(growth.row)]
            if len(sequence.table) != growth.first:
                raise RuntimeError(f"row {growth.row}: table has {len(sequence.table)} pages")
            sequence.table.extend(growth.pages.tolist())
        if self.fail_next is not None:
            reason, self.fail_next = self.fail_next, None
            raise RuntimeError(reason)
        rows = [self._sequences[row] for row in plan.rows.tolist()]
        spans = list(zip(rows, plan.num_tokens.tolist(), plan.samples.tolist(), strict=True))
        # All rows write before any reads, as the contract says.
        for sequence, num_tokens, _ in spans:
            self._write(sequence, num_tokens)
        tokens = [self._next_token(sequence) for sequence, _, samples in spans if samples]
        for sequence, token in zip([s for s, _, samples in spans if samples], tokens, strict=True):
            sequence.tokens.append(token)
            sequence.digests.extend(_digests([token], sequence.digests[-1]))
        return StepResult(plan.step_id, np.array(tokens, np.int32))

    def _write(self, sequence: _Sequence, num_tokens: int) -> None:
        begin = sequence.num_computed_tokens
        if begin + num_tokens > len(sequence.tokens):
            raise RuntimeError(f"request {sequence.request_id}: computes unknown tokens")
        for position in range(begin, begin + num_tokens):
            page, offset = divmod(position, self._page_size)
            self._memory[sequence.table[page]][offset] = sequence.digests[position]
        sequence.num_computed_tokens += num_tokens

    def _next_token(self, sequence: _Sequence) -> int:
        for position, digest in enumerate(sequence.digests):
            page, offset = divmod(position, self._page_size)
            if self._memory[sequence.table[page]][offset] != digest:
                raise RuntimeError(
                    f"request {sequence.request_id}: page {sequence.table[page]} does not hold "
                    f"position {position} of this sequence"
                )
        token = _token_of(sequence.digests[-1], self._vocab_size)
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        if num_output < sequence.min_tokens and token in sequence.stop_ids:
            token = (token + 1) % self._vocab_size
        return token


def fake_next_token(history: list[int], vocab_size: int) -> int:
    """What the fake model says after `history`."""
    return _token_of(_digests(history)[-1], vocab_size)


def _digests(tokens: list[int], state: int = 17) -> list[int]:
    states = []
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1) % 2**64
        states.append(state)
    return states


def _token_of(digest: int, vocab_size: int) -> int:
    return (digest >> 33) % vocab_size


def _arrive(arrival: Arrival) -> _Sequence:
    table: Int32s = arrival.page_tables[0]
    return _Sequence(
        request_id=arrival.request_id,
        tokens=arrival.tokens.tolist(),
        num_computed_tokens=arrival.num_computed_tokens,
        table=table.tolist(),
        stop_ids=frozenset(arrival.stop_ids),
        num_prompt_tokens=arrival.num_prompt_tokens,
        min_tokens=arrival.sampling.min_tokens,
        digests=_digests(arrival.tokens.tolist()),
    )
