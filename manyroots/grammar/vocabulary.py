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
        # Here, as a machine may lack it on which nobody asks for a shape.
        from llguidance import LLTokenizer

        return LLTokenizer(_Wrapper(self), eos_token=list(self.eos_ids))  # type: ignore[arg-type]


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
