"""Sampling parameters by row: on the host as arrays, so that a step only selects from them, and on
the device in tables where they are large or change there.

Takes arrivals; gives a step's arrays, which travel with it and become `SamplingRows` there. The row
after the last is spare and asks for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.sampling.rows import (
    IN_PROMPT,
    MAX_STOPS,
    MAX_TOP,
    NO_LOGPROBS,
    SamplingTables,
)
from manyroots.runner.inputs import Int64s
from manyroots.runner.masks import RowMasks
from manyroots.runner.packet import send
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, Int32s

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)

DraftTables = tuple[Int32s, Int32s]
"""Guesses of a row, and the table rows of the positions after each."""


class _TableEntries:
    """Writes to the tables for a plan's arrivals, sent to the device in one copy."""

    def __init__(self) -> None:
        self._counted: list[int] = []
        """Rows whose counts begin anew."""
        self._entries: dict[str, list[tuple[int, Int64s, np.ndarray]]] = {}
        """By table: row, columns and values."""

    def count(self, row: int, tokens: Int32s, num_prompt_tokens: int) -> None:
        prompt = np.unique(tokens[:num_prompt_tokens])
        said, times = np.unique(tokens[num_prompt_tokens:], return_counts=True)
        ids = np.union1d(prompt, said).astype(np.int64)
        counts = np.where(np.isin(ids, prompt), IN_PROMPT, 0).astype(np.int32)
        counts[np.searchsorted(ids, said)] += times.astype(np.int32)
        self._counted.append(row)
        self._put("counts", row, ids, counts)

    def bias(self, row: int, biases: Mapping[int, float]) -> None:
        at = np.arange(len(biases))
        ids, values = zip(*sorted(biases.items()), strict=True)
        self._put("bias_ids", row, at, np.array(ids, np.int32))
        self._put("biases", row, at, np.array(values, np.float32))

    def stop(self, row: int, ids: tuple[int, ...]) -> None:
        self._put("stop_ids", row, np.arange(len(ids)), np.array(sorted(ids), np.int32))

    def _put(self, table: str, row: int, columns: Int64s, values: np.ndarray) -> None:
        self._entries.setdefault(table, []).append((row, columns, values))

    def write(self, tables: SamplingTables) -> None:
        if not self._entries:
            return
        arrays = {"counted": np.array(self._counted, np.int64)}
        for name, entries in self._entries.items():
            width = getattr(tables, name).shape[1]
            arrays[f"{name} places"] = np.concatenate([row * width + at for row, at, _ in entries])
            arrays[f"{name} values"] = np.concatenate([values for _, _, values in entries])
        sent = send(arrays, tables.counts.device)
        if self._counted:
            tables.counts.index_fill_(0, sent["counted"], 0)
        for name in self._entries:
            flat = getattr(tables, name).view(-1)
            flat.index_copy_(0, sent[f"{name} places"], sent[f"{name} values"])


class SamplingState:
    """What each row's sequence asked of the sampler."""

    def __init__(
        self, max_num_seqs: int, tables: SamplingTables, masks: RowMasks | None = None
    ) -> None:
        """`masks`: None where no row needs one, or another rank chooses tokens."""
        self.tables = tables
        self._masks = masks
        num_rows = max_num_seqs + 1
        self.params: list[SamplingParams] = [_GREEDY] * num_rows
        self._seed = np.zeros(num_rows, np.uint64)
        # Columns of one type lie together: a step takes its rows of all of them at once.
        self._floats = np.zeros((4, num_rows), np.float32)
        self._temperature, self._repetition, self._frequency, self._presence = self._floats
        """The temperature is 0 for greedy rows."""
        self._repetition[:] = 1.0
        self._shares = np.zeros((2, num_rows), np.float64)
        self._top_p, self._min_p = self._shares
        self._top_p[:] = 1.0
        self._counts = np.zeros((4, num_rows), np.int32)
        self._top_k, self._num_biases, self._num_stops, self._num_top = self._counts
        self._num_top[:] = NO_LOGPROBS
        self._min_tokens = np.zeros(num_rows, np.int64)
        self._has_mask = np.zeros(num_rows, np.bool_)
        self._wants_more = np.zeros(num_rows, np.bool_)
        """Rows that want more logprobs than `Sampled` has room for."""
        self.wants_prompt_logprobs = np.zeros(num_rows, np.bool_)
        self.wants_hidden = np.zeros(num_rows, np.bool_)
        self.failures: dict[int, str] = {}
        """Rows whose parameters could not be taken in, or whose grammar ended in nothing, and why:
        nothing is chosen for them."""
        self._failed_grammars: set[int] = set()

    def apply(self, arrivals: Sequence[Arrival]) -> None:
        """Store the parameters of new sequences. Never fails a step: the input processor has
        checked everything, and anything that it missed fails one request."""
        entries = _TableEntries()
        for arrival in arrivals:
            self.failures.pop(arrival.row, None)
            self._failed_grammars.discard(arrival.row)
            self._forget(arrival.row)
            try:
                self._take(arrival, entries)
            except Exception as error:
                logger.exception("the sampling parameters of a request could not be taken in")
                self._forget(arrival.row)
                self.failures[arrival.row] = (
                    f"its sampling parameters can't be used ({type(error).__name__}: {error})"
                )
        entries.write(self.tables)

    def arrays(
        self, rows: Int32s, indices: Int64s, table_rows: Int32s | None = None
    ) -> dict[str, np.ndarray]:
        """What these rows ask of a step that draws their token number `indices`: the fields of
        `SamplingRows` by name. `table_rows`: of their counts and masks; None for the same rows."""
        temperature, repetition, frequency, presence = self._floats.take(rows, axis=1)
        top_p, min_p = self._shares.take(rows, axis=1)
        top_k, num_biases, num_stops, num_top = self._counts.take(rows, axis=1)
        has_mask = self._has_mask[rows]
        if num_stops.any():
            # A mask has what min_tokens forbids taken out already.
            num_stops[(indices >= self._min_tokens[rows]) | has_mask] = 0
        return {
            "table_rows": (rows if table_rows is None else table_rows).astype(np.int64),
            "request_rows": rows.astype(np.int64),
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seeds": self._seed[rows].view(np.int64),
            "indices": indices.astype(np.int64),
            "repetition": repetition,
            "frequency": frequency,
            "presence": presence,
            "num_biases": num_biases,
            "num_stops": num_stops,
            "has_mask": has_mask.astype(np.int32),
            "num_top": num_top,
        }

    def counts_tokens(self, row: int) -> bool:
        """Whether what a row has said changes its choices."""
        return self.params[row].has_penalties

    def begin_drafts(self, drafts: Mapping[int, DraftTables]) -> None:
        """Write the counts of the positions after each guess, as if the guesses up to there had
        been said. For rows that count tokens, all at once: the device idles meanwhile."""
        counts = self.tables.counts
        there = [after.astype(np.int64) for _, after in drafts.values()]
        # A guess counts at its own position and at all after it.
        said = [
            (after[place:], token)
            for (guessed, _), after in zip(drafts.values(), there, strict=True)
            for place, token in enumerate(guessed.tolist())
        ]
        tokens = np.repeat([token for _, token in said], [len(after) for after, _ in said])
        arrays = {
            "to": np.concatenate(there),
            "from": np.repeat(np.array([*drafts], np.int64), [len(after) for after in there]),
            "said": np.concatenate([after for after, _ in said]) * counts.shape[1] + tokens,
        }
        sent = send(arrays, counts.device)
        counts.index_copy_(0, sent["to"], counts.index_select(0, sent["from"]))
        self._count_once(sent["said"])

    def count(self, tokens: Mapping[int, Int32s]) -> None:
        """Tokens of these rows were sampled after guesses, and are right: count them as their
        own."""
        width = self.tables.counts.shape[1]
        places = [
            row * width + own.astype(np.int64)
            for row, own in tokens.items()
            if len(own) and self.counts_tokens(row)
        ]
        if places:
            sent = send({"places": np.concatenate(places)}, self.tables.counts.device)
            self._count_once(sent["places"])

    def _count_once(self, places: Tensor) -> None:
        """Add one occurrence at each of these places; a place that is listed twice counts twice."""
        ones = torch.ones(len(places), dtype=torch.int32, device=places.device)
        self.tables.counts.view(-1).index_add_(0, places, ones)

    def fill_masks(self, rows: Int32s, drafts: Mapping[int, DraftTables]) -> None:
        """Bring the masks of these rows up to date with all of their tokens, for a step whose
        model is launched and whose choice is not. `drafts`: by row, its guesses and the table rows
        of the positions after each."""
        masked = rows[self._has_mask[rows]]
        if len(masked):
            assert self._masks is not None
            faults = self._masks.fill(np.unique(masked), self.tables, drafts)
            self.failures.update(faults)
            self._failed_grammars.update(faults)

    def changes_with_length(self, rows: Int32s) -> bool:
        """Whether what one of these rows asks for depends on the number of its tokens."""
        return bool(self._num_stops[rows].any())

    def has_masks(self, rows: Int32s) -> bool:
        return bool(self._has_mask[rows].any())

    def of_requests(self, rows: Int32s) -> set[int]:
        """By index, those of these rows whose failure lies in what their request asks for."""
        failed = self._failed_grammars
        return (
            {index for index, row in enumerate(rows.tolist()) if row in failed} if failed else set()
        )

    def failures_of(self, rows: Int32s) -> dict[int, str]:
        """By index, why nothing can be chosen for some of these rows."""
        if not self.failures:
            return {}
        reasons = ((index, self.failures.get(row)) for index, row in enumerate(rows.tolist()))
        return {index: reason for index, reason in reasons if reason is not None}

    def num_logprobs(self, rows: Int32s) -> dict[int, int]:
        """By index, those of these rows that want logprobs: how many of the likeliest beside their
        token."""
        wanting = (self._num_top[rows] != NO_LOGPROBS).nonzero()[0].tolist()
        return {index: self.params[rows[index]].logprobs or 0 for index in wanting}

    def exceeds_graph(self, rows: Int32s) -> bool:
        """Whether one of these rows wants more logprobs than `Sampled` has room for: the runner
        then scores the step's logits itself (`logprobs.score`)."""
        return bool(self._wants_more[rows].any())

    def _forget(self, row: int) -> None:
        """Ask for nothing."""
        self.params[row] = _GREEDY
        self._temperature[row], self._top_k[row] = 0.0, 0
        self._top_p[row], self._min_p[row] = 1.0, 0.0
        self._repetition[row], self._frequency[row], self._presence[row] = 1.0, 0.0, 0.0
        self._num_biases[row] = self._num_stops[row] = self._min_tokens[row] = 0
        self._has_mask[row] = False
        if self._masks is not None:
            self._masks.forget(row)
        self._num_top[row] = NO_LOGPROBS
        self._wants_more[row] = self.wants_prompt_logprobs[row] = False
        self.wants_hidden[row] = False

    def _take(self, arrival: Arrival, entries: _TableEntries) -> None:
        row, params = arrival.row, arrival.sampling
        self.params[row] = params
        self._seed[row] = np.uint64(arrival.seed)
        self._temperature[row] = 0.0 if params.is_greedy else params.temperature
        self._top_p[row] = params.top_p
        self._top_k[row] = max(params.top_k, 0)
        self._min_p[row] = params.min_p
        if params.has_penalties:
            self._repetition[row] = params.repetition_penalty
            self._frequency[row] = params.frequency_penalty
            self._presence[row] = params.presence_penalty
            entries.count(row, arrival.tokens, arrival.num_prompt_tokens)
        if params.logit_bias:
            entries.bias(row, params.logit_bias)
            self._num_biases[row] = len(params.logit_bias)
        if params.min_tokens and arrival.stop_ids:
            if len(arrival.stop_ids) > MAX_STOPS:
                raise ValueError(f"more than {MAX_STOPS} tokens end the text")
            entries.stop(row, arrival.stop_ids)
            self._num_stops[row] = len(arrival.stop_ids)
            self._min_tokens[row] = params.min_tokens
        if params.needs_mask and self._masks is not None:
            self._masks.begin(arrival)
            self._has_mask[row] = True
        if params.logprobs is not None:
            self._num_top[row] = min(params.logprobs, MAX_TOP)
            self._wants_more[row] = params.logprobs > MAX_TOP
        self.wants_prompt_logprobs[row] = params.prompt_logprobs is not None
        self.wants_hidden[row] = params.wants_hidden
