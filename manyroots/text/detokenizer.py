"""Text from tokens, as they come.

Takes tokens one at a time; gives the text that has become certain. A character whose bytes are
spread over several tokens appears whole, with its last token. All pieces together, with `flush`,
equal the text of the whole sequence, after a prompt: a decoder that takes the first space of a
text does not do so here. Knows nothing of stop strings.
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


def detokenizer_for(
    tokenizer: Tokenizer, *, skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
) -> Detokenizer:
    """`shown_ids`: special tokens that are never skipped."""
    kind = ByteDetokenizer if tokenizer.has_bytes else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens=skip_special_tokens, shown_ids=shown_ids)


_new_decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """For tokenizers whose pieces are exact bytes: an incremental UTF-8 decoder."""

    __slots__ = ("_decoder", "_skipped", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._decoder = _new_decoder(errors="replace")

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer: decodes the new token after the last one that showed, and gives
    what it added.

    These decoders join a token to the one before it (spaces, continued words), and none of them
    spells parts of characters. What the decoder drops, special tokens that are skipped and ids
    without a token, is not "the one before" and never reaches it.
    """

    __slots__ = ("_last", "_skipped", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._last: list[int] = []
        """The last token that showed; none before the first."""

    def push(self, token: int) -> str:
        if token in self._skipped or not self._tokenizer.has_token(token):
            return ""
        old = self._decode(self._last)
        new = self._decode([*self._last, token])
        self._last = [token]
        return new[len(old) :]

    def flush(self) -> str:
        return ""

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
