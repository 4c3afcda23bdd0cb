"""The masks of rows with structured output, or with rules about tokens: made on the host, applied
by the sampler.

Takes arrivals with a grammar or with rules for tokens, and rows whose tokens are all known; writes
their masks into the sampler's tables, ordered on the stream of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
import torch

from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.rows import GrammarRows
from manyroots.grammar.token_rules import TokenRules
from manyroots.kernels.sampling.rows import SamplingTables
from manyroots.runner.batch import PersistentBatch
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, Int32s

NUM_RULES = 8
"""Rules that are kept for further sequences of their requests."""


class RowMasks:
    """Grammars and rules by row. Only the launching thread uses it."""

    def __init__(self, grammars: GrammarCache, batch: PersistentBatch, vocab_size: int) -> None:
        self._grammars = grammars
        self._batch = batch
        self._vocab_size = vocab_size
        self._rows = GrammarRows(vocab_size)
        self._rules: deque[tuple[SamplingParams, TokenRules]] = deque(maxlen=NUM_RULES)

    def begin(self, arrival: Arrival) -> None:
        """Raises if the grammar is not there."""
        sampling = arrival.sampling
        grammar = rules = None
        if sampling.structured_outputs is not None:
            grammar = self._grammars.find(sampling.structured_outputs)
            if grammar is None:
                raise RuntimeError("the grammar of a running request is gone")
        if sampling.has_token_rules:
            rules = self._rules_of(sampling)
        self._rows.begin(
            arrival.row,
            grammar,
            arrival.num_prompt_tokens,
            rules=rules,
            min_tokens=sampling.min_tokens,
            stop_ids=arrival.stop_ids,
        )

    def _rules_of(self, sampling: SamplingParams) -> TokenRules:
        """Sequences of one request have the same object, and share what is made of it."""
        for known, rules in self._rules:
            if known is sampling:
                return rules
        made = TokenRules(
            self._vocab_size,
            sampling.allowed_token_ids,
            sampling.bad_token_ids,
            sampling.thinking_budget,
        )
        self._rules.append((sampling, made))
        return made

    def forget(self, row: int) -> None:
        self._rows.forget(row)

    def fill(
        self,
        rows: Int32s,
        tables: SamplingTables,
        drafts: Mapping[int, tuple[Int32s, Int32s]] | None = None,
    ) -> dict[int, str]:
        """The masks after all tokens of these rows; gives the reasons of those that have none.
        `drafts`: by row, its guesses and the table rows of the positions after each."""
        drafts = drafts or {}
        known = {row: self._batch.known(row) for row in rows.tolist()}
        guesses = {row: tokens for row, (tokens, _) in drafts.items() if row in known}
        masks, failures = self._rows.masks(known, guesses)
        # A row's own mask, then those after its guesses.
        places = [np.append(row, drafts[row][1]) if row in drafts else [row] for row in known]
        made, device = torch.from_numpy(masks), tables.masks.device
        at = torch.from_numpy(np.concatenate(places).astype(np.int64))
        if device.type == "cuda":
            # Page-locked memory is not used again before its copy is done.
            made, at = made.pin_memory(), at.pin_memory()
        tables.masks.index_copy_(
            0, at.to(device, non_blocking=True), made.to(device, non_blocking=True)
        )
        return failures
