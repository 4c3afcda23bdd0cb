"""Log-probabilities in the three forms that clients know.

Takes the engine's `TokenLogprobs`; gives OpenAI's form for completions, its form for chats, and
vLLM's form for prompts.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import partial

from manyroots.api.responses import (
    ChatLogprob,
    ChatLogprobs,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    ScoredToken,
)
from manyroots.step import TokenLogprobs
from manyroots.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON can't say; OpenAI and vLLM use the same number."""


Naming = Callable[[int], str]
"""What a token is called."""


def naming(tokenizer: Tokenizer, *, by_id: bool | None) -> Naming:
    """`by_id`: as vLLM names tokens that its caller wants to tell apart."""
    return _id_name if by_id else partial(_name, tokenizer)


def completion_logprobs(
    entries: Sequence[TokenLogprobs], offsets: Sequence[int], name: Naming
) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[name(entry.token) for entry in entries],
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[_top_by_name(entry, name) for entry in entries],
        text_offset=list(offsets),
    )


def echoed_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    text: str,
    entries: Sequence[TokenLogprobs],
    top: int,
    name: Naming,
) -> CompletionLogprobs:
    """For a prompt that is echoed as `text`. Nothing comes before its first token, so that has
    none."""
    return CompletionLogprobs(
        tokens=[name(token) for token in prompt],
        token_logprobs=[None, *(_finite(entry.logprob) for entry in entries)],
        top_logprobs=[None, *(_top_by_name(entry, name, top) for entry in entries)],
        text_offset=_offsets(tokenizer, prompt, text),
    )


def _offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """For each token, how many characters of the text come before it; all parts of a character
    have the same number. What tokenizers add (a first token, a first space) is in front."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    length = 0
    for token in prompt:
        offsets.append(length)
        length += len(decoder.decode(tokenizer.token_bytes(token)))
    num_added = max(0, length - len(text))
    return [min(max(0, offset - num_added), len(text)) for offset in offsets]


def joined(first: CompletionLogprobs, second: CompletionLogprobs, shift: int) -> CompletionLogprobs:
    """The echoed prompt's and the completion's; `shift` is the length of the echoed text."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + [shift + offset for offset in second.text_offset],
    )


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, by_id: bool | None = None
) -> ChatLogprobs:
    """`by_id`: tokens are named as `naming` says; their bytes are their own all the same."""
    name = _id_name if by_id else tokenizer.token_text
    return ChatLogprobs(content=[_chat_entry(tokenizer, entry, name) for entry in entries])


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """One object per prompt token, by token id; null for the first."""
    return [None, *(_scored(tokenizer, entry) for entry in entries)]


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprobs, name: Naming) -> ChatLogprob:
    tops = zip(entry.top_tokens, entry.top_logprobs, strict=True)
    return ChatLogprob(
        token=name(entry.token),
        logprob=_finite(entry.logprob),
        bytes=list(tokenizer.token_bytes(entry.token)),
        top_logprobs=[
            ChatTopLogprob(name(token), _finite(logprob), list(tokenizer.token_bytes(token)))
            for token, logprob in tops
        ],
    )


def _scored(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, ScoredToken]:
    scored = {
        str(token): ScoredToken(_finite(logprob), place + 1, tokenizer.token_text(token))
        for place, (token, logprob) in enumerate(
            zip(entry.top_tokens, entry.top_logprobs, strict=True)
        )
    }
    own = ScoredToken(_finite(entry.logprob), entry.rank, tokenizer.token_text(entry.token))
    return {str(entry.token): own} | scored


def _top_by_name(entry: TokenLogprobs, name: Naming, limit: int | None = None) -> dict[str, float]:
    pairs = list(zip(entry.top_tokens, entry.top_logprobs, strict=True))[:limit]
    top = {name(token): _finite(logprob) for token, logprob in pairs}
    return top | {name(entry.token): _finite(entry.logprob)}


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _name(tokenizer: Tokenizer, token: int) -> str:
    """The token as text; a part of a character as OpenAI writes it, `bytes:\\xf0\\x9f`."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
