"""Guesses of the model's own prediction layer (MTP): made after a step's tokens, for the next step.

The layer's entry of a token depends on that token and on the model's hidden state before it. A
step therefore fills the entries of its own tokens. The hidden state before a sequence's first token
of the step is in pages: each page stores the state after its newest token. So entries do not depend
on chunks, cached prefixes or pauses.

Guesses start from the newest token of each row, which only the device knows. Entries of guesses are
written to pages that the row already has, and overwritten by the next step. Where these pages end,
guesses end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import Row
from manyroots.kernels.sampling.rows import NO_FAULT, Sampled
from manyroots.layers.step import Step
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.drafts import CheckedDraft
from manyroots.runner.forward import Forward
from manyroots.runner.inputs import NOWHERE, Int64s, StepInputs
from manyroots.runner.packet import send
from manyroots.runner.views import StepViews
from manyroots.step import Int32s


@dataclass(frozen=True, slots=True)
class Guesses:
    """Guesses of one step, on their way to the host."""

    rows: Int32s
    num_free: Int64s
    """For each row, how many positions after its newest token without a right guess have pages."""
    tokens: Tensor
    """int64 [rows, guesses], on the host once `done` has happened."""
    done: torch.cuda.Event | None

    def by_row(self, num_right: dict[Row, int]) -> dict[Row, Int32s]:
        """Those of each row; `num_right`: how many guesses of the step itself were right."""
        if self.done is not None:
            self.done.synchronize()
        found = {}
        for place, row in enumerate(map(Row, self.rows.tolist())):
            count = int(self.num_free[place]) - num_right.get(row, 0)
            if count > 0:
                found[row] = self.tokens[place, :count].numpy().astype(np.int32)
        return found


@dataclass(frozen=True, slots=True)
class _Filled:
    """What is left of a step for its guesses."""

    inputs: StepInputs
    hidden: Tensor
    """After each token of the step."""
    before: Tensor
    """The state that was stored for each sequence before the step."""
    token_pages: Tensor
    """The page that stores the state after each token."""


class PredictedTokens:
    """Fills the prediction layer's entries, and guesses with it."""

    def __init__(
        self, forward: Forward, batch: PersistentBatch, *, page_size: int, max_len: int
    ) -> None:
        prediction = forward.decoder.prediction
        assert prediction is not None
        assert prediction.states is not None, "the decoder has its memory"
        self._forward, self._decoder, self._batch = forward, forward.decoder, batch
        self._page_size, self._max_len = page_size, max_len
        self._family, self._states = prediction.family, prediction.states[:, 0]
        self._goes_back = forward.decoder.num_paged < len(forward.decoder.families)
        """Whether a row whose guess was wrong computes the step's tokens again."""

    def fill(self, inputs: StepInputs, hidden: Tensor, tokens: Tensor, step: Step) -> _Filled:
        """Write the entries of a step's tokens, which have these hidden states."""
        if step.before_layer is not None:
            step.before_layer(self._decoder.spec.num_layers)
        size, starts = self._page_size, inputs.query_starts[:-1]
        begin = inputs.positions[starts]
        pages = inputs.pages[self._family].astype(np.int64)
        ends = np.flatnonzero(inputs.positions % size == size - 1)
        table = self._batch.page_tables[self._family]
        sent = send(
            {
                "starts": starts,
                "before": table[inputs.rows, np.maximum(begin - 1, 0) // size].astype(np.int64),
                "begin": begin,
                "ends": ends,
                "end_pages": pages[ends],
                "pages": pages,
            },
            hidden.device,
        )
        before = self._states[sent["before"]]
        self._states.index_copy_(0, sent["end_pages"], hidden[sent["ends"]])
        # Another row may have filled the page before, in this step.
        begins_page = (sent["begin"] % size == 0)[:, None]
        carried = torch.where(begins_page, self._states[sent["before"]], before)
        carried = carried.masked_fill((sent["begin"] == 0)[:, None], 0.0)
        previous = hidden.roll(1, 0).index_copy_(0, sent["starts"], carried)
        self._decoder.predict(tokens, previous, step, only_memory=True)
        return _Filled(inputs, hidden, before, sent["pages"])

    def keep_newest(
        self, filled: _Filled, drafts: Sequence[CheckedDraft], sampled: Sampled | None
    ) -> tuple[Tensor, Tensor]:
        """Store each sequence's newest state; gives the number of right guesses of each, and the
        place of its newest token in the step."""
        inputs, device = filled.inputs, filled.hidden.device
        num_right = torch.zeros(len(inputs.rows), dtype=torch.int64, device=device)
        newest = inputs.query_starts[1:] - 1
        is_undone = torch.zeros(len(inputs.rows), dtype=torch.bool, device=device)
        if drafts:
            assert sampled is not None
            places = _places(inputs, drafts)
            newest = newest.copy()
            newest[places] -= [len(draft.tokens) for draft in drafts]
            right, is_whole = _count_right(drafts, sampled)
            at = torch.from_numpy(places).to(device)
            num_right.index_copy_(0, at, right)
            if self._goes_back:
                is_undone.index_copy_(0, at, ~is_whole)
        last = torch.from_numpy(newest).to(device) + num_right
        states = torch.where(is_undone[:, None], filled.before, filled.hidden[last])
        self._states.index_copy_(0, filled.token_pages[last], states)
        return num_right, last

    def guess(
        self, filled: _Filled, num_right: Tensor, last: Tensor, sampled: Sampled, count: int
    ) -> Guesses:
        """This many guesses after each newest token. `num_right`, `last`: as `keep_newest` gave
        them."""
        inputs, device, size = filled.inputs, filled.hidden.device, self._page_size
        firsts = np.flatnonzero(inputs.guesses == 0)
        places = inputs.sampling[firsts]
        rows, lens = inputs.rows[places], inputs.context_lens[places]
        covered = -(-lens // size) * size
        num_drafted = np.diff(np.append(firsts, len(inputs.guesses))) - 1
        # The newest token of a row without a right guess is at this position.
        newest = lens - num_drafted
        limit = np.minimum(covered, self._max_len)
        sent = send(
            {
                "firsts": firsts,
                "places": places,
                "rows": rows.astype(np.int64),
                "newest": newest,
                "limit": limit,
            },
            device,
        )
        right = num_right[sent["places"]]
        # The token of a row with a fault may be any number.
        tokens = sampled.tokens[sent["firsts"] + right].long()
        tokens = tokens.clamp(0, self._decoder.spec.vocab_size - 1)
        hidden = filled.hidden[last[sent["places"]]]
        positions, found = sent["newest"] + right, []
        tables = self._forward.rows.page_tables[:, sent["rows"]]
        for _ in range(count):
            has_page = positions < sent["limit"]
            at = positions.clamp(max=self._max_len - 1)
            page = tables.gather(2, (at // size).expand(len(tables), -1)[:, :, None].long())[..., 0]
            views = StepViews(
                tokens=tokens,
                token_rows=sent["rows"],
                positions=at,
                pages=torch.where(has_page, page, NOWHERE),
                offsets=(at % size).to(torch.int32),
                lens=(at + 1).to(torch.int32),
            )
            tokens, step = self._forward.step(views, len(rows), None, max_chunk=1)
            states = self._decoder.predict(tokens, hidden, step)
            assert states is not None
            hidden, positions = states, positions + 1
            tokens = self._decoder.logits(hidden, None).argmax(1)
            found.append(tokens)
        return _sent(rows, np.minimum(limit - newest, count), torch.stack(found, dim=1))


def _places(inputs: StepInputs, drafts: Sequence[CheckedDraft]) -> Int64s:
    """The sequence of each draft, by its place in the step."""
    return np.array([inputs.sampling[draft.samples[0]] for draft in drafts], np.int64)


def _count_right(drafts: Sequence[CheckedDraft], sampled: Sampled) -> tuple[Tensor, Tensor]:
    """How many guesses of each draft are right, and whether all are: `drafts.count_right`, on
    the device."""
    longest = max(len(draft.tokens) for draft in drafts)
    guessed = np.full((len(drafts), longest), -1, np.int64)
    samples = np.empty((len(drafts), longest + 1), np.int64)
    for place, draft in enumerate(drafts):
        guessed[place, : len(draft.tokens)] = draft.tokens
        samples[place] = draft.samples[-1]
        samples[place, : len(draft.samples)] = draft.samples
    counts = np.array([len(draft.tokens) for draft in drafts], np.int64)
    sent = send({"guessed": guessed, "samples": samples, "counts": counts}, sampled.tokens.device)
    own = sampled.tokens[sent["samples"]]
    is_good = sampled.faults[sent["samples"]] == NO_FAULT
    is_right = (own[:, :-1] == sent["guessed"]) & is_good[:, 1:]
    right = is_right.long().cumprod(1).sum(1)
    return right, right == sent["counts"]


def _sent(rows: Int32s, num_free: Int64s, tokens: Tensor) -> Guesses:
    """Begin the copy to the host."""
    if tokens.device.type != "cuda":
        return Guesses(rows, num_free, tokens, None)
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has none here
    done.record()
    return Guesses(rows, num_free, host, done)
