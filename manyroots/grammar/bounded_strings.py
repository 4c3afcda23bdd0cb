"""Masks inside a JSON string with a `maxLength`, without a walk through the vocabulary.

Takes a schema, and a row's tokens; gives the same mask as the row's own matcher, or nothing where
it can't. Near the limit of a string, a matcher tries every longer token of the vocabulary. Here the
mask is what the schema without limits allows, and of that the tokens that fit (`StringFits`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from manyroots.grammar.library import matchers

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Words = npt.NDArray[np.uint32]

MAX_LEFT = 16
"""Characters. Where more are left, the matcher's own sets of tokens cover nearly all."""
_UNDECIDED = {
    "oneOf", "allOf", "not", "if", "then", "else", "pattern", "format",
    "patternProperties", "propertyNames", "dependentSchemas", "contains",
}  # fmt: skip
"""Keywords by which a place in a text may belong to several schemas, or a string's letters depend
on each other: what a string may hold is then more than a number of characters."""


def without_limits(schema: Any) -> Any:
    """The schema without the limits of its strings; None if it has none, or they are not all there
    is to its strings."""
    found = _Limits()
    made = found.removed(schema)
    return made if found.num_limits and not found.is_undecided else None


class _Limits:
    def __init__(self) -> None:
        self.num_limits = 0
        self.is_undecided = False

    def removed(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self.is_undecided |= not _UNDECIDED.isdisjoint(schema)
        self.is_undecided |= not _are_apart(schema.get("anyOf", []))
        self.num_limits += "maxLength" in schema
        return {
            word: self._inner(word, value) for word, value in schema.items() if word != "maxLength"
        }

    def _inner(self, word: str, value: Any) -> Any:
        if word in ("properties", "$defs", "definitions") and isinstance(value, dict):
            return {name: self.removed(one) for name, one in value.items()}
        if word in ("prefixItems", "anyOf") and isinstance(value, list):
            return [self.removed(one) for one in value]
        return self.removed(value) if word in ("items", "additionalProperties") else value


def _are_apart(alternatives: Any) -> bool:
    """Whether the first character of a value says which of these it is: each has another type, as
    in `string or null`."""
    if not isinstance(alternatives, list):
        return False
    types = [one.get("type") if isinstance(one, dict) else None for one in alternatives]
    words = [kind for kind in types if isinstance(kind, str)]
    return len(words) == len(set(words)) == len(alternatives)


class StringFits:
    """For one vocabulary: which tokens fit into what is left of a string, whatever follows it."""

    def __init__(self, tokenizer: LLTokenizer, pieces: Sequence[bytes], options: Any) -> None:
        """`options`: those of every schema's grammar. The vocabulary has a quote and the letter `a`
        as tokens of their own. Takes some ten milliseconds."""
        self.num_words = -(-tokenizer.vocab_size // 32)
        self._quote = pieces.index(b'"')
        self.probe = [pieces.index(b"a")] * (MAX_LEFT + 1)
        """Letters, to ask a matcher how many of them it takes."""
        self.by_left = [self._mask(tokenizer, left, options) for left in range(MAX_LEFT + 1)]
        self.texts = self._mask(tokenizer, None, options) & ~_bits(
            [b'"' in piece or b"\\" in piece for piece in pieces], self.num_words
        )
        """Tokens that any string without a limit takes at any place, and does not end with."""
        self._reaching = np.array(
            [token for token, piece in enumerate(pieces) if piece[:-1].count(b'"') > 1], np.int64
        )
        """Tokens that may end one string and have a part of another: some hundred."""

    def reaching_of(self, mask: Words) -> list[int]:
        """Tokens of a mask that may have a part of another string."""
        at = self._reaching
        words = mask[at // 32] >> (at % 32).astype(np.uint32)
        return [int(token) for token in at[(words & 1).astype(np.bool_)]]

    def _mask(self, tokenizer: LLTokenizer, left: int | None, options: Any) -> Words:
        schema: dict[str, Any] = {"type": "string", "x-guidance": options}
        if left is not None:
            schema["maxLength"] = left
        text = json.dumps(
            {
                "grammars": [
                    {"name": "main", "lark_grammar": "start: @text /(.|\\n)*/"},
                    {"name": "text", "json_schema": schema},
                ]
            }
        )
        matcher = matchers()(tokenizer, text, log_level=0)
        matcher.consume_tokens([self._quote])
        return np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self.num_words].copy()


class StringMasks:
    """One row's."""

    __slots__ = ("_fits", "_matcher", "_num_consumed")

    def __init__(self, matcher: LLMatcher, fits: StringFits, num_prompt_tokens: int) -> None:
        """`matcher`: of the schema without limits, at its beginning."""
        self._matcher = matcher
        self._fits = fits
        self._num_consumed = num_prompt_tokens

    def fill(self, own: LLMatcher, tokens: npt.NDArray[np.int32], mask: Words) -> bool:
        """Write the mask after these tokens, if the row is inside a string whose end is near.
        `own`: the row's matcher, which has consumed them."""
        fits = self._fits
        left = own.validate_tokens(fits.probe)
        if not 1 <= left <= MAX_LEFT:
            return False
        self._matcher.consume_tokens(tokens[self._num_consumed :].tolist())
        self._num_consumed = len(tokens)
        if self._matcher.is_error():
            return False
        free = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: fits.num_words]
        # Names of properties and words of an enum take letters, too, but not all.
        if ((free & fits.texts) != fits.texts).any():
            return False
        fitting = free & fits.by_left[left]
        for token in fits.reaching_of(fitting):
            if not own.validate_tokens([token]):
                fitting[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        mask[:] = fitting
        return True


def _bits(chosen: Sequence[bool], num_words: int) -> Words:
    bits = np.zeros(num_words * 32, np.bool_)
    bits[: len(chosen)] = chosen
    return np.packbits(bits, bitorder="little").view(np.uint32)
