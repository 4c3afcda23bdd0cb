"""Where each row is in its grammar, and which tokens may come next.

Takes rows' grammars, their rules for single tokens and their tokens as they become known; gives
packed masks. What goes wrong with one row's grammar is that row's fault alone. One thread uses it,
and no others make masks: on 16 cores a pool of them took longer than one thread, be it with a lexer
for all rows (copies of a matcher share theirs, under a lock) or with one for every four (each
learns anew).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from manyroots.grammar.cache import CompiledGrammar
from manyroots.grammar.token_rules import TokenRules, take_out

if TYPE_CHECKING:
    from llguidance import LLMatcher

Masks = npt.NDArray[np.int32]
TokenIds = npt.NDArray[np.int32]
_NO_TOKENS: TokenIds = np.empty(0, np.int32)
_ALL = -1
"""Every bit of a word."""
_NOTHING_LEFT = (
    "allowed_token_ids, bad_words and what else is asked of the output leave no token to go on "
    "with; allow more"
)


class _RowGrammar:
    """One completion's way through its grammar, if it has one, and its rules for tokens."""

    __slots__ = (
        "early_stops",
        "matcher",
        "min_tokens",
        "num_consumed",
        "num_prompt_tokens",
        "rules",
        "strings",
    )

    def __init__(
        self,
        grammar: CompiledGrammar | None,
        rules: TokenRules | None,
        num_prompt_tokens: int,
        min_tokens: int,
        stops: Sequence[int],
    ) -> None:
        self.matcher = None if grammar is None else grammar.start()
        self.strings = None if grammar is None else grammar.start_strings(num_prompt_tokens)
        self.rules = rules
        self.num_prompt_tokens = num_prompt_tokens
        self.num_consumed = num_prompt_tokens
        """Tokens of the sequence that the matcher has consumed; the prompt's are not its own."""
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
        grammar: CompiledGrammar | None,
        num_prompt_tokens: int,
        *,
        rules: TokenRules | None = None,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """A sequence takes a row. What it has beyond the prompt is consumed with its next mask."""
        mine = _RowGrammar(grammar, rules, num_prompt_tokens, min_tokens, stop_ids)
        self._rows[row] = mine

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def masks(
        self, known: Mapping[int, TokenIds], guesses: Mapping[int, TokenIds] | None = None
    ) -> tuple[Masks, dict[int, str]]:
        """A mask for each row, in the order of `known`, which has all of its tokens so far; and the
        reasons of rows that have none. After the mask of a row with `guesses` come the masks after
        each guess. Where a guess is not allowed, or nothing can follow it, those allow nothing."""
        guesses = guesses or {}
        num_masks = len(known) + sum(map(len, guesses.values()))
        masks = np.full((num_masks, self._num_words), _ALL, np.int32)
        failures: dict[int, str] = {}
        place = 0
        for row, tokens in known.items():
            mine, guessed = self._rows[row], guesses.get(row, _NO_TOKENS)
            reason = _follow(mine, tokens, masks, place)
            if reason is None:
                reason = _narrow(mine, tokens, masks[place].view(np.uint32))
            if reason is not None:
                failures[row] = reason
                masks[place] = _ALL
            elif len(guessed):
                _look_ahead(mine, tokens, guessed, masks[place : place + 1 + len(guessed)])
            place += 1 + len(guessed)
        return masks, failures


def _follow(
    mine: _RowGrammar, tokens: npt.NDArray[np.int32], masks: Masks, place: int
) -> str | None:
    """Fill in what a row's grammar allows; why it can't, or None."""
    if mine.matcher is None:
        return None
    # Here, as a machine without structured output may lack it.
    from llguidance.numpy import fill_next_token_bitmask

    mine.matcher.consume_tokens(tokens[mine.num_consumed :].tolist())
    mine.num_consumed = len(tokens)
    if not mine.matcher.is_error():
        strings, mask = mine.strings, masks[place].view(np.uint32)
        if strings is None or not strings.fill(mine.matcher, tokens, mask):
            fill_next_token_bitmask(mine.matcher, masks, place)
    return _reason(mine.matcher) if mine.matcher.is_error() else None


def _look_ahead(mine: _RowGrammar, tokens: TokenIds, guessed: TokenIds, masks: Masks) -> None:
    """Fill in the masks after each guess, given the one before the first, and go back."""
    from llguidance.numpy import fill_next_token_bitmask

    behind, matcher, num_taken = masks[1:], mine.matcher, 0
    behind[:] = 0
    for place, token in enumerate(guessed.tolist()):
        if not masks[place, token // 32] >> token % 32 & 1:
            break
        if matcher is not None:
            if not matcher.consume_token(token) or matcher.is_error():
                break
            num_taken += 1
            fill_next_token_bitmask(matcher, behind, place)
            if matcher.is_error():
                break
        else:
            behind[place] = _ALL
        so_far = np.concatenate((tokens, guessed[: place + 1]))
        if _narrow(mine, so_far, behind[place].view(np.uint32)) is not None:
            behind[place] = 0
            break
    if matcher is not None and num_taken:
        matcher.rollback(num_taken)


def _narrow(
    mine: _RowGrammar, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.uint32]
) -> str | None:
    """Take out what the row's rules forbid, and ends that would come too early; why nothing is
    left, or None."""
    if mine.rules is not None:
        mine.rules.narrow(mask, tokens[mine.num_prompt_tokens :])
    if len(tokens) < mine.min_tokens:
        kept = mask.copy()
        take_out(kept, mine.early_stops)
        # The end of a grammar is the text's, before min_tokens too.
        if kept.any() or mine.matcher is None:
            mask[:] = kept
    return _NOTHING_LEFT if mine.rules is not None and not mask.any() else None


def _reason(matcher: LLMatcher) -> str:
    told = " ".join(matcher.get_error().partition("<state>")[0].split())[:300]
    return f"its structured output can't go on ({told or 'no reason given'})"
