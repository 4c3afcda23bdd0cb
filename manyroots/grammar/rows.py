"""Where each row is in its grammar, and which tokens may come next.

Takes rows' grammars and their tokens as they become known; gives packed masks. What goes wrong
with one row's grammar is that row's fault alone. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from manyroots.grammar.cache import CompiledGrammar

Masks = npt.NDArray[np.int32]
_ALL = -1
"""Every bit of a word."""
_PARALLEL_FROM = 4
"""Fewer masks are made faster than threads can be woken."""


class _RowGrammar:
    """One completion's way through its grammar."""

    __slots__ = ("early_stops", "lexer", "matcher", "min_tokens", "num_consumed")

    def __init__(
        self,
        grammar: CompiledGrammar,
        num_prompt_tokens: int,
        min_tokens: int,
        stops: Sequence[int],
    ) -> None:
        self.matcher, self.lexer = grammar.start()
        self.num_consumed = num_prompt_tokens
        """Tokens of the sequence that the matcher has behind it; the prompt's are not its own."""
        self.min_tokens = num_prompt_tokens + min_tokens
        self.early_stops = tuple(stops) if min_tokens else ()


class GrammarRows:
    """The rows that have a grammar."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._rows: dict[int, _RowGrammar] = {}
        self._threads: LLExecutor | None = None

    def begin(
        self,
        row: int,
        grammar: CompiledGrammar,
        num_prompt_tokens: int,
        *,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """A sequence takes a row. What it has beyond the prompt is consumed with its next mask."""
        self._rows[row] = _RowGrammar(grammar, num_prompt_tokens, min_tokens, stop_ids)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def masks(self, known: Mapping[int, npt.NDArray[np.int32]]) -> tuple[Masks, dict[int, str]]:
        """A mask for each row, in the order of `known`, which has all of its tokens so far; and the
        reasons of rows that have none."""
        masks = np.full((len(known), self._num_words), _ALL, np.int32)
        failures: dict[int, str] = {}
        wanted: list[tuple[LLMatcher, int]] = []
        lexers: list[int] = []
        for place, (row, tokens) in enumerate(known.items()):
            mine = self._rows[row]
            mine.matcher.consume_tokens(tokens[mine.num_consumed :].tolist())
            mine.num_consumed = len(tokens)
            if not mine.matcher.is_error():
                wanted.append((mine.matcher, place))
                lexers.append(mine.lexer)
        self._fill([wanted[i] for i in np.argsort(lexers, kind="stable").tolist()], masks)
        for place, (row, tokens) in enumerate(known.items()):
            mine = self._rows[row]
            if mine.matcher.is_error():
                failures[row] = _reason(mine.matcher)
                masks[place] = _ALL
            elif len(tokens) < mine.min_tokens:
                _take_out(masks[place], mine.early_stops)
        return masks, failures

    def _fill(self, wanted: list[tuple[LLMatcher, int]], masks: Masks) -> None:
        """Neighbours have one lexer: a thread takes some in a row, so that few wait for it."""
        if len(wanted) < _PARALLEL_FROM:
            for matcher, place in wanted:
                fill_next_token_bitmask(matcher, masks, place)
            return
        if self._threads is None:
            self._threads = LLExecutor()
        fill_next_token_bitmask_par(self._threads, wanted, masks)


def _take_out(mask: npt.NDArray[np.int32], stops: Sequence[int]) -> None:
    """No end before min_tokens, unless nothing else is left: the grammar's end is the text's."""
    bits = mask.view(np.uint32)
    kept = bits.copy()
    for token in stops:
        kept[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    if kept.any():
        bits[:] = kept


def _reason(matcher: LLMatcher) -> str:
    told = " ".join(matcher.get_error().partition("<state>")[0].split())[:300]
    return f"its structured output can't go on ({told or 'no reason given'})"
