"""One step, laid out flat: what `batch.py` makes of a plan and the model is given.

A short step can be written with every token as a row of its own, so that a decode step's graph
computes it. Keys and values of all rows are written before any row attends, layer by layer, so
tokens of one sequence may be rows side by side: each sees those before it. What a graph saves is
the host's time to launch some 350 kernels one by one, which is most of the time of a short prompt,
and of what is left of a long one whose beginning is in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.latent.step import PromptLens
from manyroots.step import MAX_STEP_DRAFT_TOKENS, Int32s

Int64s = npt.NDArray[np.int64]

NOWHERE = -1
"""The page of a token whose keys and values are not kept."""
MAX_SINGLE_TOKENS = 64
"""More would no longer be bound by reading the weights, as a decode step is."""
MAX_CHECKING_TOKENS = MAX_SINGLE_TOKENS + MAX_STEP_DRAFT_TOKENS
"""With guesses: steps of prompts beside decodes have no room for so many samples."""
MAX_SEEN_TOKENS = 1 << 17
"""Summed over the tokens of prompts, each of which reads what it sees by itself; or over the
sequences of a step with guesses, if each history is read once."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Sequences with a single token first, then the longer ones; within both those of the base
    model first, then by adapter slot."""

    rows: Int32s
    """Row of each sequence, in this order."""
    token_rows: Int32s
    """Row of each token."""
    tokens: Int64s
    positions: Int64s
    query_starts: Int64s
    """Sequence i has flat tokens [query_starts[i], query_starts[i + 1])."""
    context_lens: Int64s
    """Tokens that a sequence's last token sees, itself included."""
    num_decodes: int
    pages: Int32s
    """[families of pages, tokens]: the page each token's keys and values are written to."""
    offsets: Int64s
    """The place within that page, in every family the same."""
    units: Int32s
    """[families of states, sequences]: where each sequence's state is."""
    token_slots: Int64s | None
    """The adapter slot of each token, or NO_ADAPTER; None if no token has one."""
    sampling: Int64s
    """Of each sample, the sequence that it is for, as an index into `rows`, ascending."""
    sampling_order: Int64s
    """For each sampling row of the plan, in its order, which of `sampling` is its first."""
    sampled_at: Int64s
    """Of each sample, the token that it follows."""
    guesses: Int64s
    """Of each sample, how many guessed tokens of its sequence it follows; 0 without a draft."""

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has a single token."""
        return self.num_decodes == len(self.rows)

    @property
    def prompt_lens(self) -> PromptLens | None:
        """Of sequences that do not decode; None: all do."""
        if self.is_decode:
            return None
        count = self.num_decodes
        return PromptLens(np.diff(self.query_starts)[count:], self.context_lens[count:])


def table_rows_of(inputs: StepInputs, spare_row: int) -> Int32s:
    """The sampler's table row of each sample: its sequence's own, and for those after a guess one
    of those after the spare row."""
    rows: Int32s = inputs.rows[inputs.sampling]
    is_guess = inputs.guesses > 0
    rows[is_guess] = spare_row + 1 + np.arange(np.count_nonzero(is_guess))
    return rows


def is_short(inputs: StepInputs, *, reads_once: bool = False) -> bool:
    """Whether its tokens may as well be rows of their own. `reads_once`: whether attention reads
    the history of a sequence with guesses once."""
    count, checks = inputs.num_decodes, bool(inputs.guesses.any())
    most = MAX_CHECKING_TOKENS if checks else MAX_SINGLE_TOKENS
    seen = inputs.positions[inputs.query_starts[count] :]
    if checks and reads_once:
        seen = inputs.context_lens[count:]
    return len(inputs.tokens) <= most and bool(seen.sum() <= MAX_SEEN_TOKENS)


def as_single_tokens(inputs: StepInputs) -> StepInputs:
    """The same step with a row for each token; rows of one adapter stay adjacent. Not for
    layers with states, which take a sequence's tokens one after the other."""
    if len(inputs.units):
        raise ValueError("tokens of a sequence with a state can't be rows of their own")
    inputs = _by_adapter(inputs)
    num_tokens = len(inputs.tokens)
    return replace(
        inputs,
        rows=inputs.token_rows,
        query_starts=np.arange(num_tokens + 1),
        context_lens=inputs.positions + 1,
        num_decodes=num_tokens,
        units=np.empty((0, num_tokens), np.int32),
        sampling=inputs.sampled_at,
    )


def _by_adapter(inputs: StepInputs) -> StepInputs:
    """The same step with all tokens of an adapter together; its sequences have no meaning."""
    slots = inputs.token_slots
    if slots is None or (slots[1:] >= slots[:-1]).all():
        return inputs
    order = np.argsort(slots, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    sampled_at = place[inputs.sampled_at]
    in_order = np.argsort(sampled_at)
    rank = np.empty_like(in_order)
    rank[in_order] = np.arange(len(in_order))
    return replace(
        inputs,
        token_rows=inputs.token_rows[order],
        tokens=inputs.tokens[order],
        positions=inputs.positions[order],
        pages=inputs.pages[:, order],
        offsets=inputs.offsets[order],
        token_slots=slots[order],
        sampling_order=rank[inputs.sampling_order],
        sampled_at=sampled_at[in_order],
        guesses=inputs.guesses[in_order],
    )


@dataclass(frozen=True, slots=True)
class SpareRow:
    """The spare row, and what it has of each family."""

    row: int
    num_paged: int
    units: Int32s
    """[families of states]: the spare ones."""


def blank_decode(num_rows: int, spare: SpareRow, *, with_adapters: bool) -> StepInputs:
    """Single tokens of the spare row, which are not sampled: to compile and to capture with."""
    return _blank(np.ones(num_rows, np.int64), spare, with_adapters)


def blank_prefill(
    num_tokens: int, spare: SpareRow, *, with_adapters: bool, max_len: int | None = None
) -> StepInputs:
    """One sequence of the spare row, or several of up to `max_len` tokens: to compile and to
    measure with."""
    num_seqs = 1 if max_len is None else -(-num_tokens // max_len)
    # As equal as possible: a sequence of one token would decode.
    bounds = np.arange(num_seqs + 1) * num_tokens // num_seqs
    return _blank(np.diff(bounds), spare, with_adapters)


def _blank(counts: Int64s, spare: SpareRow, with_adapters: bool) -> StepInputs:
    num_tokens = int(counts.sum())
    nothing = np.empty(0, np.int64)
    return StepInputs(
        rows=np.full(len(counts), spare.row, np.int32),
        token_rows=np.full(num_tokens, spare.row, np.int32),
        tokens=np.zeros(num_tokens, np.int64),
        positions=np.zeros(num_tokens, np.int64),
        query_starts=np.concatenate(([0], np.cumsum(counts))),
        context_lens=counts,
        num_decodes=int(np.count_nonzero(counts == 1)),
        pages=np.full((spare.num_paged, num_tokens), NOWHERE, np.int32),
        offsets=np.zeros(num_tokens, np.int64),
        units=np.repeat(spare.units[:, None], len(counts), axis=1),
        token_slots=np.full(num_tokens, NO_ADAPTER) if with_adapters else None,
        sampling=nothing,
        sampling_order=nothing,
        sampled_at=nothing,
        guesses=nothing,
    )
