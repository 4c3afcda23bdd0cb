"""A model's tokens as `llguidance` knows them.

Takes what each token adds to a text, as bytes; gives an `LLTokenizer` as wide as the
model's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


_LENGTHS = (1, 2, 3, 4, 6, 10, 20, 30)
_LETTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_LETTER}{{1,{length}}}" for length in _LENGTHS),
    f"{_LETTER}+",
)
"""Sets of tokens that are allowed together wherever a string's text may go on, so that none of them
is looked at. llguidance's own sets begin at 10 characters: inside of a string with a `maxLength`
and fewer left, it walked the whole vocabulary for each mask. `bounded_strings.py` does without a
walk where the schema allows; these sets are for the others."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything that grammars need to know of a tokenizer."""

    pieces: Sequence[bytes]
    """One for each id that the model can give; b"" for ids without a token."""
    special_ids: Collection[int]
    eos_ids: Sequence[int]
    """Tokens that end a text; at least one."""
    encode: Callable[[str], list[int]]
    """A text's tokens, none added."""

    def tokenizer(self) -> LLTokenizer:
        """Takes a moment."""
        # Here, as a machine without structured output may lack it.
        from llguidance import LLTokenizer

        wrapper, ends = _Wrapper(self), list(self.eos_ids)
        return LLTokenizer(wrapper, eos_token=ends, slices=list(SLICES))  # type: ignore[arg-type]


class _Wrapper:
    """The attributes that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens = list(vocabulary.pieces)
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
