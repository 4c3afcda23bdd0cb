"""From logits to tokens.

Each row's choice depends on its own logits, parameters and draw alone, never on its neighbours:
of equal logits the lower token id comes first, and sums are exact (`cuts.py`). A row whose choice
fails has a fault of its own; the others have their tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.sampling.cuts import Cuts, draw
from manyroots.kernels.sampling.exact import uniform
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import Int64s
from manyroots.runner.sampling_state import SamplingState
from manyroots.step import Int32s

NOT_FINITE = "the model gave logits that are not finite"
ALL_FORBIDDEN = (
    "no token is left to choose: min_tokens forbids those that end the text, and there are no "
    "others. Lower min_tokens or give fewer stop_token_ids"
)
ROWS_AT_ONCE = 32
"""Rows drawn together: bounds the memory for weights over the vocabulary."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen for some rows."""

    tokens: Int32s
    faults: dict[int, str]
    """By index: why a row has no token. Its place in `tokens` means nothing."""


class Sampler:
    """Chooses one token per row of logits."""

    def __init__(self, batch: PersistentBatch, state: SamplingState) -> None:
        self._batch = batch
        self._state = state

    def sample(self, logits: Tensor, rows: Int32s) -> Choices:
        """Tokens for `rows`, given float32 logits [len(rows), vocabulary]. Changes `logits` where
        rows ask for it."""
        best, greedy = logits.max(dim=-1)
        tokens = greedy.cpu().numpy().astype(np.int32)
        faults: dict[int, str] = {}
        if self._state.failures:
            reasons = ((i, self._state.failures.get(row)) for i, row in enumerate(rows.tolist()))
            faults = {index: reason for index, reason in reasons if reason is not None}
        for index in np.flatnonzero(~torch.isfinite(best).cpu().numpy()).tolist():
            faults.setdefault(index, NOT_FINITE)
        for index in np.flatnonzero(self._state.edits_logits[rows]).tolist():
            if index not in faults:
                self._choose_edited(logits[index], int(rows[index]), index, tokens, faults)
        is_random = self._state.temperature[rows] > 0.0
        is_random[list(faults)] = False
        random = np.flatnonzero(is_random)
        for begin in range(0, len(random), ROWS_AT_ONCE):
            self._draw(logits, rows, random[begin : begin + ROWS_AT_ONCE], tokens, faults)
        return Choices(tokens, faults)

    def _choose_edited(
        self, logits: Tensor, row: int, index: int, tokens: Int32s, faults: dict[int, str]
    ) -> None:
        """Edit one row in place; its likeliest token may be another then."""
        try:
            self._edit(logits, row)
            best, greedy = logits.max(dim=-1)
            tokens[index] = int(greedy)
            if not torch.isfinite(best):
                faults[index] = ALL_FORBIDDEN
        except Exception as error:  # whatever it is, it is this request's alone
            faults[index] = _told(error)

    def _edit(self, logits: Tensor, row: int) -> None:
        """Bias, minimum length and penalties of one row, in place."""
        params = self._state.params[row]
        known = self._batch.known(row)
        num_prompt = int(self._batch.num_prompt_tokens[row])
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if len(known) - num_prompt < params.min_tokens and self._state.stop_ids[row]:
            logits[torch.tensor(self._state.stop_ids[row], device=logits.device)] = -torch.inf
        if params.repetition_penalty != 1.0:
            ids = torch.from_numpy(np.unique(known).astype(np.int64)).to(logits.device)
            seen = logits[ids]
            factor = params.repetition_penalty
            edited = torch.where(seen > 0, seen / factor, seen * factor)
            # Beyond what a number holds upwards; downwards it is as good as forbidden.
            logits[ids] = edited.clamp(max=torch.finfo(logits.dtype).max)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            said, counts = np.unique(known[num_prompt:], return_counts=True)
            cost = params.frequency_penalty * counts + params.presence_penalty
            ids = torch.from_numpy(said.astype(np.int64)).to(logits.device)
            logits[ids] -= torch.from_numpy(cost.astype(np.float32)).to(logits.device)

    def _draw(
        self, logits: Tensor, rows: Int32s, at: Int64s, tokens: Int32s, faults: dict[int, str]
    ) -> None:
        """Draw for the rows at the indices `at`; one by one where that fails together."""
        try:
            tokens[at] = self._drawn(logits, rows, at)
        except Exception as error:
            if len(at) == 1:
                faults[int(at[0])] = _told(error)
                return
            for index in at:
                self._draw(logits, rows, np.array([index]), tokens, faults)

    def _drawn(self, logits: Tensor, rows: Int32s, at: Int64s) -> Int64s:
        state, mine = self._state, rows[at]
        numbers = uniform(state.seed[mine], self._batch.num_output_tokens(mine))
        cuts = Cuts(
            state.temperature[mine],
            state.top_k[mine].astype(np.int64),
            state.top_p[mine],
            state.min_p[mine],
        )
        chosen = logits if len(at) == len(rows) else logits[torch.from_numpy(at).to(logits.device)]
        return draw(chosen, cuts, numbers)


def _told(error: Exception) -> str:
    logger.exception("sampling failed for a request")
    return f"sampling failed for this request ({type(error).__name__}: {str(error)[:300]})"
