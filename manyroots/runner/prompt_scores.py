"""The log-probability of each token of a prompt, for rows that ask for it.

Takes a step's inputs and its hidden states; gives scores by row, of the positions that the step
computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import Row
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import Int64s, StepInputs
from manyroots.runner.logprobs import POSITIONS_AT_ONCE, score
from manyroots.runner.packet import send
from manyroots.runner.sampling_state import SamplingState
from manyroots.step import TokenLogprobs

LogitsAt = Callable[[StepInputs, Tensor, Int64s, Tensor], Tensor]
"""Of a step and its hidden states: logits after some tokens, whose places are given on the host
and on the device."""
PromptScores = dict[Row, tuple[TokenLogprobs, ...]]


class PromptScorer:
    """Scores the prompts of a batch's rows."""

    def __init__(
        self, batch: PersistentBatch, state: SamplingState, logits: LogitsAt, device: torch.device
    ) -> None:
        self._batch = batch
        self._state = state
        self._logits = logits
        self._device = device

    def score(self, inputs: StepInputs, hidden: Tensor) -> PromptScores:
        result: PromptScores = {}
        for index in np.flatnonzero(self._state.wants_prompt_logprobs[inputs.rows]).tolist():
            row = int(inputs.rows[index])
            begin, end = (int(s) for s in inputs.query_starts[index : index + 2])
            first = int(inputs.positions[begin])
            count = min(end - begin, int(self._batch.num_prompt_tokens[row]) - 1 - first)
            if count <= 0:
                continue
            targets = self._batch.known(row)[first + 1 : first + 1 + count].astype(np.int64)
            num_top = self._state.params[row].prompt_logprobs or 0
            scores: list[TokenLogprobs] = []
            for offset in range(0, count, POSITIONS_AT_ONCE):
                part = targets[offset : offset + POSITIONS_AT_ONCE]
                at = begin + np.arange(offset, offset + len(part))
                views = send({"at": at, "targets": part}, self._device)
                logits = self._logits(inputs, hidden, at, views["at"]).float()
                scores.extend(score(logits, views["targets"], [num_top] * len(part)))
            result[Row(row)] = tuple(scores)
        return result
