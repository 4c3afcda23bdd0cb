"""Where each row is in its grammar, and which tokens may come next.

Takes rows' grammars and their tokens as they become known; gives packed masks. What goes wrong
with one row's grammar is that row's fault alone. One thread uses it, and no others make masks: on
16 cores a pool of them took longer than one thread, be it with a lexer for all rows (copies of a
matcher share theirs, behind a lock) or with one for every four (each learns anew).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from manyroots.grammar.cache import CompiledGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

Masks = npt.NDArray[np.int32]
_ALL = -1
"""Every bit of a word."""


class _RowGrammar:
    """One completion's way through its grammar."""

    __slots__ = ("early_stops", "matcher", "min_tokens", "num_consumed")

    def __init__(
        self,
        grammar: CompiledGrammar,
        num_prompt_tokens: int,
        min_tokens: int,
        stops: Sequence[int],
    ) -> None:
        self.matcher = grammar.start()
        self.num_consumed = num_prompt_tokens
        """Tokens of the sequence that the matcher has behind it; the prompt's are not its own."""
        self.min_tokens = num_prompt_tokens + min_tokens
        self.early_stops = tuple(stops) if min_tokens else ()


class GrammarRows:
    """The rows that have a grammar."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._rows: dict[int, _RowGrammar] = {}

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
        # Here, as a machine may lack it on which nobody asks for a shape.
        from llguidance.numpy import fill_next_token_bitmask

        masks = np.full((len(known), self._num_words), _ALL, np.int32)
        failures: dict[int, str] = {}
        for place, (row, tokens) in enumerate(known.items()):
            mine = self._rows[row]
            mine.matcher.consume_tokens(tokens[mine.num_consumed :].tolist())
            mine.num_consumed = len(tokens)
            if not mine.matcher.is_error():
                fill_next_token_bitmask(mine.matcher, masks, place)
            if mine.matcher.is_error():
                failures[row] = _reason(mine.matcher)
                masks[place] = _ALL
            elif len(tokens) < mine.min_tokens:
                _take_out(masks[place], mine.early_stops)
        return masks, failures


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
