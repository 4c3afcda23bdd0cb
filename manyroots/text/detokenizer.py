"""Text from tokens, as they come.

Takes tokens one at a time; gives the text that has become certain. A character whose bytes are
spread over several tokens appears whole, with its last token. All pieces together, with `flush`,
equal the text of the whole sequence. Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from manyroots.text.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """One sequence's text."""

    def push(self, token: int) -> str:
        """The text that this token makes certain; often the token's own, sometimes nothing."""
        ...

    def flush(self) -> str:
        """What is left at the end; an unfinished character shows as U+FFFD."""
        ...


def detokenizer_for(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Detokenizer:
    if tokenizer.has_bytes:
        return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)


_new_decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """For tokenizers whose pieces are exact bytes: an incremental UTF-8 decoder."""

    __slots__ = ("_decoder", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _new_decoder(errors="replace")

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window twice and gives what the new token added.

    The window begins where text was last given out, so that rules which look at neighbouring
    tokens (spaces, joined punctuation) see the ones they need.
    """

    __slots__ = ("_given", "_skip", "_start", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens: list[int] = []
        self._start = 0
        """Where the window begins."""
        self._given = 0
        """Tokens before this one have had their text given out."""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        old = self._decode(self._tokens[self._start : self._given])
        new = self._decode(self._tokens[self._start :])
        if new.endswith("\ufffd") and not final:
            return ""
        self._start, self._given = self._given, len(self._tokens)
        return new[len(old) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
