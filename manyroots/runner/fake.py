"""A runner without a model: deterministic tokens, and memories that can be wrong.

For every unit of every family and tier it keeps digests of the tokens written there and of all
before them, as keys, values and states depend on both, and reads a row's history back *through its
page tables*, as layers would. Any mistake of the decide half (a page of another request, one not
filled yet, one freed too early, a state of another prefix) makes a digest wrong, and the step
raises. Told which units requests hold, it also raises where a step reads or writes one that was
given back, though it was not written to since. For tests; needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from manyroots.cache.families.family import Family
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.ids import AdapterDigest, AdapterSlot, RequestId, Row, Tier
from manyroots.step import (
    AdapterIntent,
    AdapterLoaded,
    Arrival,
    Copy,
    CopyDone,
    LoadAdapter,
    LoadId,
    Plan,
    StepResult,
)

PageContent = tuple[int | None, ...]
"""What a unit holds: a digest per token of a page, or one for a state."""


@dataclass(slots=True)
class _Sequence:
    request_id: RequestId
    tokens: list[int]
    num_computed_tokens: int
    tables: list[list[int]]
    stop_ids: frozenset[int]
    num_prompt_tokens: int
    min_tokens: int
    slot: AdapterSlot | None
    weights: AdapterDigest | None
    weights_from: int
    """The first position that these weights compute."""
    digests: list[int]
    """Entry i stands for tokens[: i + 1], each computed with the weights that compute it."""

    def learn(self, token: int) -> None:
        self.tokens.append(token)
        digest = _next_digest(self.digests, token, self.weights, self.weights_from)
        self.digests.append(digest)


class FakeRunner:
    """Computes a step at once, in the caller's thread. Copies end when `finish_copies` says."""

    def __init__(
        self,
        *,
        page_size: int,
        vocab_size: int,
        families: tuple[Family, ...] = (FULL_ATTENTION,),
        finish_copies: Callable[[list[Copy]], list[tuple[Copy, bool]]] | None = None,
        finish_loads: Callable[[list[LoadAdapter]], list[AdapterLoaded]] | None = None,
        is_held: Callable[[int, int], bool] | None = None,
    ) -> None:
        """`finish_copies` and `finish_loads` take what is under way and say what ends now;
        `is_held`, of a family and a unit, whether a request holds it now that the step is
        planned."""
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._families = families
        self._finish_copies = finish_copies or (lambda copies: [(copy, True) for copy in copies])
        self._memory: dict[tuple[int, Tier, int], list[int | None]] = {}
        """(family, tier, unit) -> content."""
        self._storage: dict[tuple[int, bytes], PageContent] = {}
        self._under_way: deque[tuple[Copy, list[PageContent]]] = deque()
        self._is_held = is_held or (lambda family, unit: True)
        self._finish_loads = finish_loads or _finish_all
        self._loads: dict[LoadId, LoadAdapter] = {}
        self._slots: dict[AdapterSlot, AdapterDigest] = {}
        """The weights in each adapter slot."""
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
        for unit in plan.lent_units:
            self._memory.pop((0, Tier.DEVICE, unit), None)
        for intent in plan.adapters:
            self._begin_intent(intent)
        for arrival in plan.arrivals:
            weights = None
            if arrival.adapter_slot is not None:
                weights = self._slots.get(arrival.adapter_slot)
                if weights is None:
                    raise RuntimeError(f"adapter slot {arrival.adapter_slot} holds no weights")
            self._sequences[int(arrival.row)] = _arrive(arrival, weights)
        for growth in plan.new_pages:
            columns = (growth.rows.tolist(), growth.places.tolist(), growth.pages.tolist())
            for row, place, page in zip(*columns, strict=True):
                table = self._sequences[row].tables[growth.family]
                if len(table) != place:
                    raise RuntimeError(f"row {row}: table has {len(table)} units")
                table.append(page)
        for copy in plan.copies:
            if not copy.is_after_model:
                self._begin_copy(copy)
        if self.fail_next is not None:
            reason, self.fail_next = self.fail_next, None
            raise RuntimeError(reason)
        num_accepted: list[int] = []
        tokens = self._compute(plan, num_accepted)
        for copy in plan.copies:
            if copy.is_after_model:
                self._begin_copy(copy)
        return StepResult(
            plan.step_id,
            np.array(tokens, np.int32),
            num_accepted=accepted_by_row(plan, num_accepted),
            copies=self._end_copies(),
            adapters=self._end_loads(),
        )

    def _begin_intent(self, intent: AdapterIntent) -> None:
        if isinstance(intent, LoadAdapter):
            if intent.target is not None:
                self._slots.pop(intent.target.slot, None)
            self._loads[intent.load_id] = intent
        elif intent.target is not None:
            self._slots.pop(intent.target.slot, None)

    def _end_loads(self) -> tuple[AdapterLoaded, ...]:
        done = tuple(self._finish_loads(list(self._loads.values())))
        for loaded in done:
            load = self._loads.pop(loaded.load_id)
            if loaded.error is None and load.target is not None:
                self._slots[load.target.slot] = load.digest
        return done

    def _compute(self, plan: Plan, num_accepted: list[int]) -> list[int]:
        """Tokens of the rows that sample; how many guesses of each are right goes into
        `num_accepted`."""
        rows = [self._sequences[row] for row in plan.rows.tolist()]
        drafts = {int(draft.row): draft.tokens.tolist() for draft in plan.drafts}
        guessed = [drafts.get(row, []) for row in plan.rows.tolist()]
        for sequence, draft in zip(rows, guessed, strict=True):
            for token in draft:
                sequence.learn(token)
        spans = list(zip(rows, plan.num_tokens.tolist(), plan.samples.tolist(), strict=True))
        before = [sequence.num_computed_tokens for sequence in rows]
        # All rows write before any reads, as the contract says; states are read first.
        for sequence, num_tokens, _ in spans:
            if sequence.slot is not None and self._slots.get(sequence.slot) != sequence.weights:
                raise RuntimeError(f"request {sequence.request_id}: its adapter slot was taken")
            self._check_states(sequence)
            self._write(sequence, num_tokens)
        for (sequence, _, _), begin in zip(spans, before, strict=True):
            self._check_pages(sequence, begin)
        tokens = []
        for (sequence, _, samples), draft in zip(spans, guessed, strict=True):
            if samples:
                num_accepted.append(self._accept(sequence, len(draft)))
                tokens.append(self.next_token(sequence))
                sequence.learn(tokens[-1])
        return tokens

    def _accept(self, sequence: _Sequence, num_drafts: int) -> int:
        """Take the guesses at a sequence's end that are what the model says, and take back the
        rest; gives how many are right."""
        if not num_drafts:
            return 0
        num_sure = len(sequence.tokens) - num_drafts
        guesses = sequence.tokens[num_sure:]
        del sequence.tokens[num_sure:], sequence.digests[num_sure:]
        num_right = 0
        while num_right < num_drafts and guesses[num_right] == self.next_token(sequence):
            sequence.learn(guesses[num_right])
            num_right += 1
        sequence.num_computed_tokens = num_sure + num_right
        if num_right < num_drafts and any(family.is_state for family in self._families):
            sequence.num_computed_tokens = num_sure - 1
            self._restore_states(sequence)
        num_pages = -(-sequence.num_computed_tokens // self._page_size)
        for index, family in enumerate(self._families):
            if not family.is_state:
                del sequence.tables[index][num_pages:]
        return num_right

    def _restore_states(self, sequence: _Sequence) -> None:
        """Working states are those of the computed tokens again."""
        before = sequence.digests[sequence.num_computed_tokens - 1]
        for index, family in enumerate(self._families):
            if family.is_state:
                self._memory[index, Tier.DEVICE, sequence.tables[index][0]] = [before]

    def _write(self, sequence: _Sequence, num_tokens: int) -> None:
        begin = sequence.num_computed_tokens
        end = begin + num_tokens
        if end > len(sequence.tokens):
            raise RuntimeError(f"request {sequence.request_id}: computes unknown tokens")
        for index, family in enumerate(self._families):
            if family.is_state:
                unit = sequence.tables[index][0]
                self._check_held(sequence, index, unit)
                self._memory[index, Tier.DEVICE, unit] = [sequence.digests[end - 1]]
                continue
            size = self._page_size
            for page in range(begin // size, -(-end // size)):
                unit = sequence.tables[index][page]
                self._check_held(sequence, index, unit)
                begins, ends = max(begin, page * size), min(end, (page + 1) * size)
                content = self._unit(index, unit)
                content[begins - page * size : ends - page * size] = sequence.digests[begins:ends]
        sequence.num_computed_tokens = end

    def _check_states(self, sequence: _Sequence) -> None:
        begin = sequence.num_computed_tokens
        for index, family in enumerate(self._families):
            if family.is_state and begin > 0:
                state = self._unit(index, sequence.tables[index][0])[0]
                if state != sequence.digests[begin - 1]:
                    raise RuntimeError(
                        f"request {sequence.request_id}: the working state is not that of its "
                        f"first {begin} tokens"
                    )

    def _check_pages(self, sequence: _Sequence, begin: int) -> None:
        """What the tokens from `begin` on read must be there."""
        for index, family in enumerate(self._families):
            if family.is_state:
                continue
            first = family.first_needed(begin) * self._page_size
            if not family.is_ordered:
                # Within the page the window may begin later; only what it covers is read.
                first = max(first, begin - getattr(family, "window", begin + 1) + 1, 0)
            end, size = sequence.num_computed_tokens, self._page_size
            for page in range(first // size, -(-end // size)):
                unit = sequence.tables[index][page]
                self._check_held(sequence, index, unit)
                begins, ends = max(first, page * size), min(end, (page + 1) * size)
                held = self._unit(index, unit)[begins - page * size : ends - page * size]
                digests = sequence.digests[begins:ends]
                if unit < 0 or held != digests:
                    is_right = [unit >= 0 and a == b for a, b in zip(held, digests, strict=True)]
                    raise RuntimeError(
                        f"request {sequence.request_id}: unit {unit} of family {family.name} does "
                        f"not hold position {begins + is_right.index(False)} of this sequence"
                    )

    def _check_held(self, sequence: _Sequence, family: int, unit: int) -> None:
        if unit >= 0 and not self._is_held(family, unit):
            raise RuntimeError(
                f"request {sequence.request_id}: unit {unit} of family "
                f"{self._families[family].name} was given back"
            )

    def next_token(self, sequence: _Sequence) -> int:
        token = _token_of(sequence.digests[-1], self._vocab_size)
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        if num_output < sequence.min_tokens and token in sequence.stop_ids:
            token = (token + 1) % self._vocab_size
        return token

    def _unit(self, family: int, unit: int) -> list[int | None]:
        key = (family, Tier.DEVICE, unit)
        content = self._memory.get(key)
        if content is None:
            width = 1 if self._families[family].is_state else self._page_size
            content = self._memory[key] = [None] * width
        return content

    def _begin_copy(self, copy: Copy) -> None:
        """Read the sources now: a later reuse must not change what is copied."""
        if copy.source is Tier.STORAGE:
            contents: list[PageContent] = [
                self._storage.get((copy.family, digest), ()) for digest in copy.hashes
            ]
        else:
            contents = [
                tuple(self._memory.get((copy.family, copy.source, unit), ()))
                for unit in copy.source_units.tolist()
            ]
        if copy.source is copy.target or copy.is_overlapped:
            self._write_copy(copy, contents)
        if copy.source is not copy.target:
            self._under_way.append((copy, contents))

    def _end_copies(self) -> tuple[CopyDone, ...]:
        by_id = {copy.copy_id: (copy, contents) for copy, contents in self._under_way}
        done = []
        for copy, is_good in self._finish_copies([copy for copy, _ in self._under_way]):
            _, contents = by_id.pop(copy.copy_id)
            is_good |= copy.is_overlapped  # were it not, the step would have failed
            arrived = np.array([is_good and content != () for content in contents], np.bool_)
            if is_good:
                self._write_copy(copy, contents)
            error = None if is_good else "the copy was made to fail"
            done.append(CopyDone(copy.copy_id, arrived, error))
        self._under_way = deque(by_id.values())
        return tuple(done)

    def _write_copy(self, copy: Copy, contents: list[PageContent]) -> None:
        if copy.target is Tier.STORAGE:
            for digest, content in zip(copy.hashes, contents, strict=True):
                self._storage[copy.family, digest] = content
            return
        for unit, content in zip(copy.target_units.tolist(), contents, strict=True):
            if content:
                self._memory[copy.family, copy.target, unit] = list(content)


def accepted_by_row(plan: Plan, num_accepted: list[int]) -> dict[Row, int]:
    """For rows with a draft; `num_accepted` has one number for each row that samples."""
    if not plan.drafts:
        return {}
    sampling = plan.rows[plan.samples].tolist()
    counts = dict(zip(sampling, num_accepted, strict=True))
    return {draft.row: counts[int(draft.row)] for draft in plan.drafts}


def fake_next_token(
    history: list[int], vocab_size: int, weights: bytes | None = None, weights_from: int = 0
) -> int:
    """What the fake model says after `history`, with an adapter's weights from a position on."""
    return _token_of(_digests(history, weights, weights_from)[-1], vocab_size)


def _digests(tokens: list[int], weights: bytes | None, weights_from: int) -> list[int]:
    digests: list[int] = []
    for token in tokens:
        digests.append(_next_digest(digests, token, weights, weights_from))
    return digests


def _next_digest(before: list[int], token: int, weights: bytes | None, weights_from: int) -> int:
    """Of a token after those digested so far; carries the weights that computed each of them."""
    state = before[-1] if before else 17
    if weights is not None and len(before) >= weights_from:
        state += int.from_bytes(weights, "little") * 2 + 1
    return (state * 6364136223846793005 + token + 1) % 2**64


def _token_of(digest: int, vocab_size: int) -> int:
    return (digest >> 33) % vocab_size


def _finish_all(loads: list[LoadAdapter]) -> list[AdapterLoaded]:
    return [AdapterLoaded(load.load_id, None) for load in loads]


def _arrive(arrival: Arrival, weights: AdapterDigest | None) -> _Sequence:
    tokens = arrival.tokens.tolist()
    return _Sequence(
        request_id=arrival.request_id,
        tokens=tokens,
        num_computed_tokens=arrival.num_computed_tokens,
        tables=[table.tolist() for table in arrival.page_tables],
        stop_ids=frozenset(arrival.stop_ids),
        num_prompt_tokens=arrival.num_prompt_tokens,
        min_tokens=arrival.sampling.min_tokens,
        slot=arrival.adapter_slot,
        weights=weights,
        weights_from=arrival.adapter_from,
        digests=_digests(tokens, weights, arrival.adapter_from),
    )
