"""A model's tokenizer: text to token ids and back.

Takes text or ids, gives ids or text; safe to share between threads. Knows the vocabulary and the
chat template's source, nothing of requests. Where it comes from is `tokenizer_files.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from manyroots.errors import RequestError
from manyroots.text.pieces import piece_bytes


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Names that chat templates ask for, and the token that ends a text."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None

    def for_template(self) -> dict[str, str]:
        names = {"bos_token": self.bos, "eos_token": self.eos}
        names |= {"pad_token": self.pad, "unk_token": self.unk}
        return {name: token for name, token in names.items() if token is not None}


class Tokenizer:
    """Encodes and decodes. Frozen after construction."""

    __slots__ = (
        "_backend",
        "_first",
        "_pieces",
        "chat_template",
        "eos_token_ids",
        "max_piece_bytes",
        "special_ids",
        "special_tokens",
        "tool_template",
        "vocab_size",
    )

    def __init__(
        self,
        backend: Backend,
        special_tokens: SpecialTokens,
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        """`tool_template`: that of chats with tools, where a model has one of its own for them."""
        # A tokenizer file may ask for truncation; a server must never shorten a prompt silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = piece_bytes(backend)
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.tool_template = tool_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        eos = vocabulary.get(special_tokens.eos) if special_tokens.eos is not None else None
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.max_piece_bytes = max((len(token.encode()) for token in vocabulary), default=1)
        bos = vocabulary.get(special_tokens.bos) if special_tokens.bos is not None else None
        added_first = backend.encode("", add_special_tokens=True).ids[:1]
        self._first: list[int] = added_first if added_first == [bos] else []
        """The token that begins every text, where there is one."""

    def ends_with(self, models: Iterable[int], vocab_size: int) -> tuple[int, ...]:
        """Tokens that end a text: the model's and the tokenizer's. Training on chats often
        changes the second alone; as in vLLM, both end."""
        own = (token for token in self.eos_token_ids if token < vocab_size)
        return tuple(dict.fromkeys((*models, *own)))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in it become those tokens; a first one
        that is spelled out is not added once more."""
        try:
            # The batch call lets other threads run meanwhile; the single one holds the GIL.
            [encoding] = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError) as error:
            raise RequestError(
                "the text holds a lone surrogate, which is not a character; "
                "replace it (text.encode('utf-8', 'replace')).",
                field="prompt",
            ) from error
        except Exception as error:  # the only kind that the tokenizers package raises
            raise RequestError(
                f"the model's tokenizer can't encode the text ({error}); it lacks a token for it. "
                "Ask the server's operator for another --tokenizer.",
                field="prompt",
            ) from error
        ids = list(encoding.ids)
        is_twice = add_special_tokens and self._first and ids[:2] == self._first * 2
        return ids[1:] if is_twice else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`; ids without a token add nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def for_transformers(self) -> Any:
        """A copy of it as a tokenizer of transformers."""
        # Imported here: it takes seconds, and only some callers need it.
        from transformers import PreTrainedTokenizerFast

        backend = Backend.from_str(self._backend.to_str())
        made = PreTrainedTokenizerFast(
            tokenizer_object=backend, **self.special_tokens.for_template()
        )
        made.chat_template = self.chat_template
        return made

    def has_token(self, token: int) -> bool:
        """Whether an id is a token's: models have more ids than their tokenizer uses."""
        return self._backend.id_to_token(token) is not None

    def token_id(self, token: str) -> int | None:
        """The id of what is a single token, special or not."""
        return self._backend.token_to_id(token)

    def special_id(self, token: str) -> int | None:
        """The id of a special token; None for what is spelled like other text."""
        index = self._backend.token_to_id(token)
        return index if index in self.special_ids else None

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """The ids of those that are single tokens here."""
        found = (self._backend.token_to_id(token) for token in tokens)
        return frozenset(index for index in found if index is not None)

    @property
    def has_bytes(self) -> bool:
        """Whether `token_bytes` is exact, also for a part of a character."""
        return self._pieces is not None

    def token_bytes(self, token: int) -> bytes:
        """What this token adds to a text; b"" for an id without a token."""
        if self._pieces is None:
            return self.decode([token], skip_special_tokens=False).encode()
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def token_text(self, token: int) -> str:
        """The token on its own, for display; a part of a character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")
