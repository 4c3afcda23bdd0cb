"""What a caller may ask of the sampler, checked once at the door.

Takes numbers from a request; gives a frozen, valid `SamplingParams`. Knows nothing of the
model: limits that depend on it (vocabulary, context length) are checked where it is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from manyroots.errors import RequestError

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_TOKENS_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are those vLLM's users know."""

    n: int = 1
    """How many completions of the same prompt."""
    temperature: float = 1.0
    """0 is greedy."""
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
    """The same seed, prompt and parameters give the same tokens, whatever else is running."""
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

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}).",
                field="min_tokens",
            )
        _check_optional_count("logprobs", self.logprobs)
        _check_optional_count("prompt_logprobs", self.prompt_logprobs)
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.",
                field="stop",
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError("stop holds an empty string; remove it.", field="stop")
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"a stop string has {len(text)} characters; "
                    f"at most {MAX_STOP_LENGTH} are allowed.",
                    field="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; "
                f"at most {MAX_STOP_TOKEN_IDS} are allowed.",
                field="stop_token_ids",
            )

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; "
                f"at most {MAX_LOGIT_BIAS} are allowed.",
                field="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _check_float(f"logit_bias[{token}]", bias, -100.0, 100.0, name="logit_bias")

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(
            f"{name} is {value!r}; it must be an integer from {low} to {high}.", field=name
        )


def _check_float(
    label: str, value: float, low: float, high: float, *, above: bool = False, name: str = ""
) -> None:
    good = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
        and not (above and value == low)
    )
    if not good:
        span = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise RequestError(
            f"{label} is {value!r}; it must be a finite number {span}.", field=name or label
        )


def _check_optional_count(name: str, value: int | None) -> None:
    if value is not None:
        _check_int(name, value, 0, MAX_LOGPROBS)
