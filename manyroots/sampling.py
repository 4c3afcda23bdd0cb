"""What a caller may ask of the sampler, checked once by the input processor.

Takes numbers from a request; gives a frozen, valid `SamplingParams` of plain Python values, which
cross between processes and which the sampler can carry out: no parameter of one request may fail a
step that others are in. Knows nothing of the model: limits that depend on it (vocabulary, context
length) are checked where it is known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from manyroots.errors import RequestError
from manyroots.structured_outputs import StructuredOutputsParams

MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 1 << 16
"""Of all bad words together."""
MAX_TOKENS_LIMIT = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Temperatures below this are 0, as in vLLM: a quotient by less is beyond what numbers hold."""
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many tokens a completion may reason, and the tokens that mark its reasoning."""

    num_tokens: int
    begin: int
    end: int
    is_begun: bool
    """The prompt has begun it, or the model begins without saying so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are those vLLM's users know."""

    n: int = 1
    """How many completions of the same prompt."""
    temperature: float = 1.0
    """0, and whatever is below GREEDY_BELOW, is greedy: the likeliest, of equals the lowest id."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output; above 1 discourages what has been said."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens, whatever others ask for beside
    it; docs/sampling.md says what that does not cover. -1 is None."""
    max_tokens: int | None = 16
    """None runs to the model's length limit."""
    min_tokens: int = 0
    """No stop token is sampled before this many output tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """For each output token, also this many of the likeliest alternatives."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens; such a request computes its whole prompt."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is sampled, the text's end neither unless it is one of them; None for all."""
    bad_words: tuple[str, ...] = ()
    """Never said by the tokens that spell them, at the beginning or after a space."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """The same in tokens, of which none is sampled after the others; the input processor's to fill
    in."""
    thinking_budget: ThinkingBudget | None = None
    """The end of the reasoning is forced after this many of its tokens; None for no limit."""
    structured_outputs: StructuredOutputsParams | None = None
    """The shape that the completion must have."""
    wants_hidden: bool = False
    """Also the hidden state after the prompt: for embeddings, which generate nothing else."""

    def __post_init__(self) -> None:
        self._set("n", _int("n", self.n, 1, MAX_CHOICES))
        self._set("temperature", _float("temperature", self.temperature, 0.0, 100.0))
        self._set("top_p", _float("top_p", self.top_p, 0.0, 1.0, above=True))
        self._set("top_k", _int("top_k", self.top_k, -1, 2**31 - 1))
        self._set("min_p", _float("min_p", self.min_p, 0.0, 1.0))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _float(name, getattr(self, name), -2.0, 2.0))
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        penalty = _float("repetition_penalty", self.repetition_penalty, low, high)
        self._set("repetition_penalty", penalty)
        if self.seed == -1:
            self._set("seed", None)
        elif self.seed is not None:
            self._set("seed", _int("seed", self.seed, -(2**63), 2**63 - 1))
        if self.max_tokens is not None:
            self._set("max_tokens", _int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT))
        self._set("min_tokens", _int("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}); "
                "lower it.",
                field="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _int(name, getattr(self, name), 0, MAX_LOGPROBS))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._set(name, _bool(name, getattr(self, name)))
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("allowed_token_ids", _allowed_token_ids(self.allowed_token_ids))
        self._set("bad_words", _bad_words(self.bad_words))
        self._check_structure()

    def _check_structure(self) -> None:
        wanted = self.structured_outputs
        if wanted is None:
            return
        if not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs is {_shown(wanted)}; it must be a StructuredOutputsParams.",
                field="structured_outputs",
            )
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos is set together with a structure for the output, whose end is the "
                "text's; remove one of them.",
                field="ignore_eos",
            )

    def _set(self, name: str, value: object) -> None:
        if value is not getattr(self, name):
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def has_token_rules(self) -> bool:
        """Whether single tokens are allowed, forbidden or forced."""
        has_ids = self.allowed_token_ids is not None or bool(self.bad_token_ids)
        return has_ids or self.thinking_budget is not None

    @property
    def mask_field(self) -> str | None:
        """Of what needs one, what the caller calls it: at fault where no token is left."""
        if self.allowed_token_ids is not None:
            return "allowed_token_ids"
        if self.bad_words:
            return "bad_words"
        return None if self.structured_outputs is None else self.structured_outputs.asked_as

    @property
    def needs_mask(self) -> bool:
        """Whether what may come next is to be worked out for each token."""
        return self.structured_outputs is not None or self.has_token_rules


# What is given may be of any type: a value from a user's script, numpy's numbers among them.


def _int(name: str, value: Any, low: int, high: int) -> int:
    number = _index(value)
    if number is None or not low <= number <= high:
        raise RequestError(
            f"{name} is {_shown(value)}; it must be an integer from {low} to {high}.", field=name
        )
    return number


def _float(
    label: str, value: Any, low: float, high: float, *, above: bool = False, name: str = ""
) -> float:
    number = _real(value)
    if number is None or not low <= number <= high or (above and number == low):
        span = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise RequestError(
            f"{label} is {_shown(value)}; it must be a finite number {span}.", field=name or label
        )
    return number


def _bool(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    raise RequestError(f"{name} is {_shown(value)}; it must be true or false.", field=name)


def _stops(given: Any) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else _items("stop", given, MAX_STOP_STRINGS)
    return tuple(_text("stop", text) for text in stops)


def _bad_words(given: Any) -> tuple[str, ...]:
    words = tuple(_text("bad_words", word) for word in _items("bad_words", given, MAX_BAD_WORDS))
    words = tuple(dict.fromkeys(words)) if len(set(words)) < len(words) else words
    if (length := sum(map(len, words))) > MAX_BAD_CHARACTERS:
        raise RequestError(
            f"bad_words has {length} characters; at most {MAX_BAD_CHARACTERS} are allowed in all. "
            "Send fewer or shorter words.",
            field="bad_words",
        )
    for word in words:
        if word.isspace():
            raise RequestError(
                f"bad_words holds {_shown(word)}, white space alone, and words are forbidden with "
                "and without a space before them; forbid its tokens by logit_bias instead.",
                field="bad_words",
            )
    return words


def _text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{name} holds {_shown(text)}; it must be strings.", field=name)
    if not text:
        raise RequestError(f"{name} holds an empty string; remove it.", field=name)
    if len(text) > MAX_STOP_LENGTH:
        raise RequestError(
            f"{name} holds a string of {len(text)} characters; at most {MAX_STOP_LENGTH} are "
            "allowed.",
            field=name,
        )
    if not _is_encodable(text):
        raise RequestError(
            f"{name} holds {_shown(text)}, a lone surrogate, which no text has; remove it.",
            field=name,
        )
    return str(text)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stop_token_ids(given: Any) -> tuple[int, ...]:
    items = _items("stop_token_ids", given, MAX_STOP_TOKEN_IDS)
    return tuple(_token_id("stop_token_ids", token) for token in items)


def _allowed_token_ids(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    items = _items("allowed_token_ids", given, MAX_ALLOWED_TOKEN_IDS)
    if not items:
        raise RequestError(
            "allowed_token_ids is empty, so that nothing could be said; name some, or leave it "
            "out.",
            field="allowed_token_ids",
        )
    if set(map(type, items)) != {int}:
        items = tuple(_token_id("allowed_token_ids", token) for token in items)
    # As a set: there may be as many as the vocabulary has, and repeats beyond that.
    wanted = sorted(set(items))
    for token in (wanted[0], wanted[-1]):
        _token_id("allowed_token_ids", token)
    return items if len(wanted) == len(items) else tuple(wanted)


def _logit_bias(given: Any) -> dict[int, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(
            f"logit_bias is {_shown(given)}; it must map token ids to numbers.", field="logit_bias"
        )
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS} are allowed.",
            field="logit_bias",
        )
    biases: dict[int, float] = {}
    for key, bias in given.items():
        token = _token_id("logit_bias", key)
        biases[token] = _float(f"logit_bias[{token}]", bias, -100.0, 100.0, name="logit_bias")
    return biases


def _items(name: str, given: Any, most: int) -> tuple[Any, ...]:
    """What is in a list; nothing where none is given."""
    if given is None:
        return ()
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise RequestError(f"{name} is {_shown(given)}; it must be a list.", field=name)
    items = tuple(given)
    if len(items) > most:
        raise RequestError(
            f"{name} has {len(items)} entries; at most {most} are allowed.", field=name
        )
    return items


def _token_id(name: str, value: Any) -> int:
    number = _index(value)
    if number is None or not 0 <= number < 2**31:
        raise RequestError(
            f"{name} names the token {_shown(value)}; a token id is an integer from 0.", field=name
        )
    return number


def _index(value: Any) -> int | None:
    """A plain integer, numpy's too; None for whatever is none. True is an answer, not a count."""
    if type(value) is int:  # nearly always, and far cheaper to ask
        return value
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return operator.index(value) if is_integer else None


def _real(value: Any) -> float | None:
    """A plain finite number; None for whatever is none."""
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # an integer beyond all floats
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    """A value in an error, cut short: an integer may have more digits than Python prints."""
    try:
        text = repr(value)
    except ValueError:
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 100 else text[:100] + "..."
