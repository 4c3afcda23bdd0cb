"""Inputs and outputs of the sampler: tensors on the device, one entry per row.

Small numbers travel with each step (`SamplingRows`). Large data, and data that changes on the
device, is in tables by batch row (`SamplingTables`); a step's row names its table row. The last
batch row belongs to no request: padding, and rows that do not sample, name it and request nothing.
Positions after a guess have counts and masks of their own, and their request's biases and stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from manyroots.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS

MAX_TOP = MAX_LOGPROBS
"""Most top tokens that `Sampled` has room for."""
MAX_BIASES = MAX_LOGIT_BIAS
MAX_STOPS = 2 * MAX_STOP_TOKEN_IDS
"""A caller's stop ids, and as many of the model's own."""
IN_PROMPT = 1 << 30
"""In a count: the prompt has the token. The lower bits count its occurrences in the output."""
NO_LOGPROBS = -1

NO_FAULT, NOT_FINITE, ALL_FORBIDDEN, FAILED = range(4)
"""The reason that a row has no token. Only the host's sampler uses FAILED, with a message."""


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """One row per batch row, one unused row; counts and masks then have rows for guessed
    positions."""

    counts: Tensor
    """int32 [rows + 1, vocabulary]: how often a row's output has each token, and IN_PROMPT. Valid
    only for rows with penalties: set when they arrive, updated by `sample`."""
    bias_ids: Tensor
    """int32 [rows + 1, MAX_BIASES]: different tokens, ascending"""
    biases: Tensor
    """float32 [rows + 1, MAX_BIASES]"""
    stop_ids: Tensor
    """int32 [rows + 1, MAX_STOPS], ascending"""
    masks: Tensor
    """int32 [rows + 1, vocabulary / 32]: token t is allowed if bit t % 32 of word t / 32 is set"""

    @classmethod
    def zeros(
        cls, max_num_seqs: int, vocab: int, device: torch.device, *, num_draft_rows: int = 0
    ) -> SamplingTables:
        """`num_draft_rows`: most positions of one step that follow a guess. Each has its own row,
        which is written before the step."""

        def table(width: int, dtype: torch.dtype = torch.int32, num_more: int = 0) -> Tensor:
            num_rows = max_num_seqs + 1 + num_more
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        return cls(
            counts=table(vocab, num_more=num_draft_rows),
            bias_ids=table(MAX_BIASES),
            biases=table(MAX_BIASES, torch.float32),
            stop_ids=table(MAX_STOPS),
            masks=table(-(-vocab // 32), num_more=num_draft_rows),
        )


TABLE_FIELDS = tuple(f.name for f in fields(SamplingTables))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of each row of a step; all [rows]."""

    table_rows: Tensor
    """int64: the position's own in `tables`: its counts and its mask"""
    request_rows: Tensor
    """int64: its request's in `tables`: biases and stop ids"""
    temperature: Tensor
    """float32; 0 takes the most likely token"""
    top_k: Tensor
    """int32; 0 keeps all"""
    top_p: Tensor
    """float64; 1 keeps all"""
    min_p: Tensor
    """float64; 0 keeps all"""
    seeds: Tensor
    """int64, the bits of an unsigned one"""
    indices: Tensor
    """int64: which of its random numbers the row draws"""
    repetition: Tensor
    """float32; 1 changes nothing"""
    frequency: Tensor
    """float32"""
    presence: Tensor
    """float32"""
    num_biases: Tensor
    """int32"""
    num_stops: Tensor
    """int32: number of the row's stop ids if they are forbidden in this step, otherwise 0"""
    has_mask: Tensor
    """int32, 0 or 1"""
    num_top: Tensor
    """int32: top tokens to return, up to MAX_TOP; NO_LOGPROBS for no logprobs at all"""
    tables: SamplingTables

    @classmethod
    def of(cls, views: Mapping[str, Tensor], tables: SamplingTables) -> SamplingRows:
        """From arrays of these names on the device (`SamplingState.arrays`)."""
        return cls(**{name: views[name] for name in ROW_FIELDS}, tables=tables)


ROW_FIELDS = tuple(f.name for f in fields(SamplingRows) if f.name != "tables")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen tokens. Logprobs are the model's own, before edits, temperature and cuts."""

    packed: Tensor
    """int32 [4 + 2 * MAX_TOP, rows], so that one copy brings all of it to the host"""
    told: dict[int, str] = field(default_factory=dict)
    """Messages of rows that FAILED, by index."""

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> Sampled:
        return cls(torch.empty(4 + 2 * MAX_TOP, num_rows, dtype=torch.int32, device=device))

    @property
    def tokens(self) -> Tensor:
        """int32 [rows]; undefined for a row with a fault"""
        return self.packed[0]

    @property
    def faults(self) -> Tensor:
        """int32 [rows]: NO_FAULT, or the reason that there is no token"""
        return self.packed[1]

    @property
    def logprobs(self) -> Tensor:
        """float32 [rows], of the token; like all below, for rows that request logprobs"""
        return self.packed[2].view(torch.float32)

    @property
    def ranks(self) -> Tensor:
        """int32 [rows], of the token; 1 is the most likely"""
        return self.packed[3]

    @property
    def top_ids(self) -> Tensor:
        """int32 [rows, MAX_TOP], most likely first; only the first `num_top` of a row are
        defined"""
        return self.packed[4 : 4 + MAX_TOP].T

    @property
    def top_logprobs(self) -> Tensor:
        """float32 [rows, MAX_TOP]"""
        return self.packed[4 + MAX_TOP :].view(torch.float32).T
