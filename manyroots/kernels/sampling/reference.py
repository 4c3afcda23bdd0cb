"""Reference of sampling, from logits to tokens: the rules of docs/sampling.md, row by row.

Uses numpy and Python's integers. Every other implementation gives the same tokens, ids and ranks
bit by bit, for the same logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.kernels.sampling.exact import scale_bits, uniform, weights
from manyroots.kernels.sampling.rows import (
    ALL_FORBIDDEN,
    IN_PROMPT,
    MAX_TOP,
    NO_FAULT,
    NO_LOGPROBS,
    NOT_FINITE,
    ROW_FIELDS,
    Sampled,
    SamplingRows,
    SamplingTables,
)

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of `SamplingRows`, with the same names."""

    table_rows: int
    request_rows: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seeds: int
    indices: int
    repetition: float
    frequency: float
    presence: float
    num_biases: int
    num_stops: int
    has_mask: int
    num_top: int

    @property
    def has_penalties(self) -> bool:
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """A token for each row of [rows, vocabulary], and logprobs for rows that request them. Counts
    the token of rows that have penalties."""
    sampled = Sampled.empty(logits.shape[0], torch.device("cpu"))
    sampled.packed.zero_()
    asked = {name: getattr(rows, name).tolist() for name in ROW_FIELDS}
    for index in range(logits.shape[0]):
        row = _Row(**{name: values[index] for name, values in asked.items()})
        own = logits[index].float().cpu().numpy()
        edited = _edited(own, row, rows.tables)
        fault = _fault(own, edited)
        sampled.faults[index] = fault
        if fault != NO_FAULT:
            continue
        token = _token(edited, row)
        sampled.tokens[index] = token
        if row.num_top != NO_LOGPROBS:
            _score(sampled, index, own, token, row.num_top)
        if row.has_penalties:
            rows.tables.counts[row.table_rows, token] += 1
    return Sampled(sampled.packed.to(logits.device))


def _edited(own: Logits, row: _Row, tables: SamplingTables) -> Logits:
    logits, at, asked = own.copy(), row.table_rows, row.request_rows
    for token, bias in zip(
        tables.bias_ids[asked, : row.num_biases].tolist(),
        tables.biases[asked, : row.num_biases].cpu().numpy(),
        strict=True,
    ):
        logits[token] += bias
    for token in tables.stop_ids[asked, : row.num_stops].tolist():
        logits[token] = -np.inf
    if row.has_mask:
        words = tables.masks[at].cpu().numpy().view(np.uint32)
        ids = np.arange(len(logits))
        logits[(words[ids // 32] >> (ids % 32) & 1) == 0] = -np.inf
    if row.has_penalties:
        counts = tables.counts[at].cpu().numpy()
        _penalize(logits, counts, row)
    return logits


def _penalize(logits: Logits, counts: npt.NDArray[np.int32], row: _Row) -> None:
    seen, factor = np.flatnonzero(counts), np.float32(row.repetition)
    with np.errstate(over="ignore"):
        scaled = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    # Above the range of float32 counts as its maximum; below it, the token is as good as forbidden.
    logits[seen] = np.minimum(scaled, np.finfo(np.float32).max)
    said = np.flatnonzero(counts & (IN_PROMPT - 1))
    times = (counts[said] & (IN_PROMPT - 1)).astype(np.float32)
    logits[said] -= np.float32(row.frequency) * times + np.float32(row.presence)


def _fault(own: Logits, edited: Logits) -> int:
    if not np.isfinite(own.max()):
        return NOT_FINITE
    return NO_FAULT if np.isfinite(edited.max()) else ALL_FORBIDDEN


def _order(logits: Logits) -> list[int]:
    """Token ids, most likely first; ties go to the lower id."""
    ids: list[int] = np.argsort(-logits, kind="stable").tolist()
    return ids


def _token(logits: Logits, row: _Row) -> int:
    best = int(logits.argmax())
    if row.temperature <= 0.0:
        return best
    weight = weights(logits, logits[best], np.float32(row.temperature)).tolist()
    kept = _kept(_order(logits), weight, row)
    floor = math.ceil(row.min_p * 2.0 ** scale_bits(len(logits)))
    kept = sorted(token for token in kept if weight[token] >= floor)
    total = sum(weight[token] for token in kept)
    number = uniform(np.array([row.seeds]).view(np.uint64), np.array([row.indices]))
    # The product may be rounded up to the total, or past it.
    target = min(int(float(number[0]) * float(total)), total - 1)
    running = 0
    for token in kept:
        running += weight[token]
        if running > target:
            return token
    raise AssertionError("the likeliest token has weight")


def _kept(order: list[int], weight: list[int], row: _Row) -> list[int]:
    """The tokens that top-k and top-p keep: those whose predecessors' sum does not reach top-p."""
    if row.top_k > 0:
        order = order[: row.top_k]
    if row.top_p >= 1.0:
        return order
    total = sum(weight[token] for token in order)
    limit = min(max(math.ceil(row.top_p * float(total)), 1), total)
    kept, before = [], 0
    for token in order:
        if before >= limit:
            break
        kept.append(token)
        before += weight[token]
    return kept


def _score(sampled: Sampled, index: int, own: Logits, token: int, num_top: int) -> None:
    exact = own.astype(np.float64)
    total = exact.max() + math.log(np.exp(exact - exact.max()).sum())
    order = _order(own)
    sampled.logprobs[index] = exact[token] - total
    sampled.ranks[index] = order.index(token) + 1
    for place, likely in enumerate(order[: min(num_top, MAX_TOP)]):
        sampled.top_ids[index, place] = likely
        sampled.top_logprobs[index, place] = exact[likely] - total
