"""Turns a prompt and its parameters into `Submit` messages, or refuses them with a reason.

Takes a caller's parameters and the engine's facts; gives messages that the engine can execute. The
API and `LLM` both use it. It checks everything that depends on the model once, so that the engine
can trust its messages.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
import os
import random
import struct
from collections.abc import Callable, Sequence
from numbers import Integral

from manyroots.config import Policy
from manyroots.errors import RequestError, TooLongError
from manyroots.grammar.checks import check_structure
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import EngineInfo, Retention, Submit
from manyroots.sampling import SamplingParams
from manyroots.text.tokenizer import Tokenizer

MAX_PRIORITY = 2**31 - 1


def _token_ids(prompt: Sequence[int], field: str) -> list[int]:
    """Plain integers, including numpy's. True and 1.5 are refused, although they could be
    converted."""
    tokens = list(prompt)
    if set(map(type, tokens)) <= {int}:
        return tokens
    for place, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(
                f"{field} holds {token!r:.100} at place {place}; a token id is an integer.",
                field=field,
            )
    return [operator.index(token) for token in tokens]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedSampling:
    """Checked parameters that a request's prompts share."""

    first: SamplingParams
    """Parameters of each prompt's first choice."""
    others: SamplingParams
    stop_ids: tuple[int, ...]
    priority: int


class InputProcessor:
    """Checks and numbers requests for one engine."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        rng: random.Random | None = None,
        *,
        default_max_tokens: int | None = None,
    ) -> None:
        """`rng` draws the seeds of requests without one; the system's source by default.
        `default_max_tokens`: limit for requests without one; None for all that fit."""
        self._info = info
        self._tokenizer = tokenizer
        self._rng = rng
        self._default_max_tokens = default_max_tokens
        # Callers send the same list with every request.
        self._bad_token_ids = functools.lru_cache(maxsize=64)(self._encode_bad_words)
        self._ends = tokenizer.ends_with(info.eos_token_ids, info.vocab_size)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """Tokenize a prompt. A text that is too long for any tokenization is refused before it is
        tokenized."""
        longest = self._info.max_model_len * self._tokenizer.max_piece_bytes
        if len(text) > longest:
            raise TooLongError(
                f"{field} has {len(text)} characters; this model's maximum context length is "
                f"{self._info.max_model_len} tokens, which are at most {longest} characters. "
                f"Shorten {field}.",
                field=field,
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check(self, sampling: SamplingParams, *, priority: int = 0) -> CheckedSampling:
        """Check everything that a request's prompts share, once for all of them. May take a moment:
        it tokenizes words and tests structures."""
        self._check_token_ids(sampling)
        self._check_priority(priority)
        if sampling.structured_outputs is not None:
            check_structure(sampling.structured_outputs)
        if sampling.bad_words:
            words = self._bad_token_ids(sampling.bad_words)
            sampling = dataclasses.replace(sampling, bad_token_ids=words)
        stop_ids = self._stop_ids(sampling)
        if sampling.min_tokens and len(stop_ids) >= self._info.vocab_size:
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}, and every token of the vocabulary would end "
                "the text; give fewer stop_token_ids, or min_tokens 0.",
                field="min_tokens",
            )
        if sampling.has_token_rules:
            self._check_something_left(sampling, stop_ids)
        # Prompt logprobs are the same for every choice, so only the first computes them.
        others = sampling
        if sampling.prompt_logprobs is not None:
            others = dataclasses.replace(sampling, prompt_logprobs=None)
        return CheckedSampling(sampling, others, stop_ids, priority)

    def submits(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | CheckedSampling,
        salt: str | None,
        next_request_id: Callable[[], RequestId],
        *,
        adapter: AdapterName | None,
        priority: int = 0,
        field: str = "prompt",
        retention: Retention | None = None,
    ) -> list[Submit]:
        """One message for each of the n choices. `field` is the caller's name for the prompt. For a
        request of many prompts, pass the result of `check`, which includes the priority."""
        tokens = _token_ids(prompt, field)
        self._check_prompt(tokens, field)
        if isinstance(sampling, SamplingParams):
            sampling = self.check(sampling, priority=priority)
        asked = sampling.first
        max_tokens = self._max_tokens(tokens, asked)
        return [
            Submit(
                request_id=next_request_id(),
                prompt=tokens,
                salt=salt,
                sampling=asked if choice == 0 else sampling.others,
                seed=self._seed(asked.seed, choice),
                stop_ids=sampling.stop_ids,
                adapter=adapter,
                priority=sampling.priority,
                max_tokens=None if max_tokens == asked.max_tokens else max_tokens,
                retention=retention,
            )
            for choice in range(asked.n)
        ]

    def _check_prompt(self, tokens: list[int], field: str) -> None:
        if not tokens:
            raise RequestError(
                f"{field} is empty; give at least one token to continue from.", field=field
            )
        vocab_size = self._info.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            place = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
            raise RequestError(
                f"{field} holds the token id {tokens[place]} at place {place}; "
                f"this model's ids are from 0 to {vocab_size - 1}.",
                field=field,
            )
        if len(tokens) >= self._info.max_model_len:
            raise TooLongError(
                f"This model's maximum context length is {self._info.max_model_len} tokens, "
                f"and {field} has {len(tokens)}, which leaves none for the completion. "
                f"Shorten {field}.",
                field=field,
            )

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        named = {
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": sampling.stop_token_ids,
            "allowed_token_ids": sampling.allowed_token_ids or (),
        }
        for name, tokens in named.items():
            if (token := max(tokens, default=0)) >= self._info.vocab_size:
                raise RequestError(
                    f"{name} names the token id {token}; "
                    f"this model's ids are from 0 to {self._info.vocab_size - 1}.",
                    field=name,
                )

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word: at the start of a text, and after a space. (vLLM omits the
        second if it has another number of tokens, so it would allow " Lisbon".)"""
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        bare = [word.lstrip() for word in words]
        sequences = (tuple(encode(text)) for word in bare for text in (word, f" {word}"))
        return tuple(dict.fromkeys(tokens for tokens in sequences if tokens))

    def _check_something_left(self, sampling: SamplingParams, stop_ids: Sequence[int]) -> None:
        """Checks only the first token: later ones depend on those before them."""
        forbidden = {ids[0] for ids in sampling.bad_token_ids if len(ids) == 1}
        field = "bad_words" if sampling.allowed_token_ids is None else "allowed_token_ids"
        if not self._num_left(sampling, forbidden):
            raise RequestError(
                f"{field} leaves no token that may be said, since bad_words forbids the others; "
                "forbid fewer.",
                field=field,
            )
        if sampling.min_tokens and not self._num_left(sampling, forbidden.union(stop_ids)):
            raise RequestError(
                f"{field} leaves none but tokens that end the text, and min_tokens is "
                f"{sampling.min_tokens}; allow others, or set min_tokens to 0.",
                field=field,
            )

    def _num_left(self, sampling: SamplingParams, without: set[int]) -> int:
        """The number of allowed tokens, without these."""
        if sampling.allowed_token_ids is None:
            return self._info.vocab_size - len(without)
        return len(set(sampling.allowed_token_ids) - without)

    def _check_priority(self, priority: int) -> None:
        """Refuse a priority that would have no effect, so that a caller does not rely on it."""
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {priority!r}; it must be an integer from {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY}. The lower, the more important.",
                field="priority",
            )
        if priority and self._info.scheduling_policy != Policy.PRIORITY.value:
            raise RequestError(
                f"priority is {priority}, and requests are scheduled by "
                f"{self._info.scheduling_policy!r} here, so that it would have no effect. Leave it "
                "out, or start the engine with --scheduling-policy priority.",
                field="priority",
            )

    def _max_tokens(self, tokens: list[int], sampling: SamplingParams) -> int:
        """As many as requested and as fit: programs send the most that any model can."""
        num_prompt, room = len(tokens), self._info.max_model_len - len(tokens)
        if sampling.max_tokens is None:
            max_tokens = room
            if self._default_max_tokens is not None:
                max_tokens = min(max_tokens, max(self._default_max_tokens, sampling.min_tokens))
            if sampling.min_tokens > max_tokens:
                raise RequestError(
                    f"min_tokens is {sampling.min_tokens}; after the prompt's {num_prompt} tokens "
                    f"there is room for {max_tokens}. Lower it.",
                    field="min_tokens",
                )
            return max_tokens
        return min(sampling.max_tokens, room)

    def _stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        own = () if sampling.ignore_eos else self._ends
        return tuple(dict.fromkeys((*own, *sampling.stop_token_ids)))

    def _seed(self, seed: int | None, choice: int) -> int:
        if seed is None:
            return self._rng.getrandbits(64) if self._rng else int.from_bytes(os.urandom(8))
        # Not seed + choice: neighbouring seeds would share their later choices.
        digest = hashlib.blake2b(struct.pack("<qI", seed, choice), digest_size=8).digest()
        return int.from_bytes(digest)
