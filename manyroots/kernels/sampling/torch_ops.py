"""Sampling with torch's operators, for a CPU: all rows that draw are drawn together.

Same signature as `reference.py`, and the same tokens. A row whose choice fails has its own fault
with the reason; the other rows have their tokens.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.kernels.sampling.cuts import Cuts, draw
from manyroots.kernels.sampling.exact import uniform
from manyroots.kernels.sampling.likeliest import likeliest, order_keys
from manyroots.kernels.sampling.rows import (
    ALL_FORBIDDEN,
    FAILED,
    IN_PROMPT,
    MAX_TOP,
    NO_FAULT,
    NO_LOGPROBS,
    NOT_FINITE,
    Sampled,
    SamplingRows,
)

ROWS_AT_ONCE = 32
"""Rows that are drawn together; bounds the memory for weights over the vocabulary."""

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """A token for each row of [rows, vocabulary], and logprobs for rows that request them. Counts
    the token of rows that have penalties. May overwrite `logits`."""
    logits = logits.float()
    sampled = Sampled.empty(logits.shape[0], logits.device)
    scored = (rows.num_top.numpy() != NO_LOGPROBS).nonzero()[0]
    own = logits[torch.from_numpy(scored)] if len(scored) else None
    _Choice(logits, rows, sampled).make()
    if own is not None:
        _score(own, rows, sampled, torch.from_numpy(scored))
    return sampled


class _Choice:
    """The choice of one step."""

    def __init__(self, logits: Tensor, rows: SamplingRows, sampled: Sampled) -> None:
        self._logits = logits
        self._rows = rows
        self._tokens = sampled.tokens.numpy()
        self._faults = sampled.faults.numpy()
        self._told = sampled.told

    def make(self) -> None:
        rows = self._rows
        # Numpy's argmax is far faster than torch's, gives the first of ties, and finds a NaN.
        values = self._logits.numpy()
        greedy = values.argmax(axis=-1)
        best = values[np.arange(len(greedy)), greedy]
        self._tokens[:] = greedy
        self._faults[:] = np.where(np.isfinite(best), NO_FAULT, NOT_FINITE)
        penalized = (rows.repetition.numpy() != 1.0) | (rows.frequency.numpy() != 0.0)
        penalized |= rows.presence.numpy() != 0.0
        edited = penalized | (rows.num_biases.numpy() > 0) | (rows.num_stops.numpy() > 0)
        edited |= rows.has_mask.numpy() != 0
        for index in self._good(edited).tolist():
            self._choose_edited(index)
        random = self._good(rows.temperature.numpy() > 0.0)
        for begin in range(0, len(random), ROWS_AT_ONCE):
            self._draw(random[begin : begin + ROWS_AT_ONCE])
        for index in self._good(penalized).tolist():
            rows.tables.counts[rows.table_rows[index], int(self._tokens[index])] += 1

    def _good(self, is_meant: npt.NDArray[np.bool_]) -> Ints:
        """The given rows that have no fault."""
        at: Ints = (is_meant & (self._faults == NO_FAULT)).nonzero()[0]
        return at

    def _choose_edited(self, index: int) -> None:
        """Edit one row in place; its most likely token may change."""
        try:
            edit(self._logits[index], self._rows, index)
            values = self._logits[index].numpy()
            self._tokens[index] = greedy = values.argmax()
            if not np.isfinite(values[greedy]):
                self._faults[index] = ALL_FORBIDDEN
        except Exception as error:  # any error concerns this request only
            self._fail(index, error)

    def _draw(self, at: Ints) -> None:
        """Draw for the rows at the indices `at`; one by one if drawing them together fails."""
        try:
            self._tokens[at] = self._drawn(at)
        except Exception as error:
            if len(at) == 1:
                self._fail(int(at[0]), error)
                return
            for index in at:
                self._draw(np.array([index]))

    def _drawn(self, at: Ints) -> Ints:
        rows = self._rows
        numbers = uniform(rows.seeds.numpy()[at].view(np.uint64), rows.indices.numpy()[at])
        cuts = Cuts(
            rows.temperature.numpy()[at], rows.top_k.numpy()[at].astype(np.int64),
            rows.top_p.numpy()[at], rows.min_p.numpy()[at],
        )  # fmt: skip
        is_all = len(at) == len(self._logits)
        return draw(self._logits if is_all else self._logits[torch.from_numpy(at)], cuts, numbers)

    def _fail(self, index: int, error: Exception) -> None:
        logger.exception("sampling failed for a request")
        self._faults[index] = FAILED
        self._told[index] = (
            f"sampling failed for this request ({type(error).__name__}: {str(error)[:300]})"
        )


def edit(logits: Tensor, rows: SamplingRows, index: int) -> None:
    """Bias, minimum length, mask and penalties of one row, in place."""
    tables, at = rows.tables, int(rows.table_rows[index])
    asked = int(rows.request_rows[index])
    if count := int(rows.num_biases[index]):
        logits[tables.bias_ids[asked, :count].long()] += tables.biases[asked, :count]
    if count := int(rows.num_stops[index]):
        logits[tables.stop_ids[asked, :count].long()] = -torch.inf
    if rows.has_mask[index]:
        bits = np.unpackbits(tables.masks[at].numpy().view(np.uint8), bitorder="little")
        logits[torch.from_numpy(bits[: len(logits)]) == 0] = -torch.inf
    factor, frequency = float(rows.repetition[index]), float(rows.frequency[index])
    presence = float(rows.presence[index])
    if factor == 1.0 and frequency == 0.0 and presence == 0.0:
        return
    counts = tables.counts[at].numpy()
    seen = np.flatnonzero(counts)
    times = (counts[seen] & (IN_PROMPT - 1)).astype(np.float32)
    values = logits.numpy()
    # Numpy rounds each operation, as all other implementations do.
    with np.errstate(over="ignore"):
        known = values[seen]
        known = np.where(known > 0, known / np.float32(factor), known * np.float32(factor))
    # Above the range of float32 counts as its maximum; below it, the token is as good as forbidden.
    known = np.minimum(known, np.finfo(np.float32).max)
    cost = np.float32(frequency) * times + np.float32(presence)
    values[seen] = np.where(times > 0, known - cost, known)


def _score(own: Tensor, rows: SamplingRows, sampled: Sampled, at: Tensor) -> None:
    """Logprobs of the rows at `at`; `own` are the model's unedited logits."""
    logprobs = torch.log_softmax(own, dim=-1)
    # A row without a token has none to score; any token will do.
    tokens = torch.where(sampled.faults[at] == NO_FAULT, sampled.tokens[at], 0).long()[:, None]
    keys = order_keys(own)
    sampled.logprobs[at] = logprobs.gather(-1, tokens)[:, 0]
    sampled.ranks[at] = (keys > keys.gather(-1, tokens)).sum(-1, dtype=torch.int32) + 1
    width = min(int(rows.num_top[at].max()), MAX_TOP, own.shape[-1])
    if width:
        top = likeliest(keys, width)
        sampled.top_ids[at, :width] = top.int()
        sampled.top_logprobs[at, :width] = logprobs.gather(-1, top)
