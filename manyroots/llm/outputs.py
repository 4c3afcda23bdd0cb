"""What `LLM` gives back: a prompt and its completions, in the shapes that vLLM's users know.

Takes `TextDelta`s as they come; gives growing outputs. Knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from manyroots.adapter_names import LoRARequest
from manyroots.messages import CacheUse
from manyroots.step import TokenLogprobs
from manyroots.text.assembler import TextDelta


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position."""

    logprob: float
    rank: int
    """1 is the likeliest token."""
    decoded_token: str


Logprobs = dict[int, Logprob]
"""At one position, by token id: the token that is there, then the likeliest ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """The sum over all tokens; None where logprobs were not asked for."""
    logprobs: list[Logprobs] | None = None
    """For each token; None where they were not asked for."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: LoRARequest | None = None
    adapter_revision: str | None = None
    """Which revision of the adapter computed it."""

    def add(self, delta: TextDelta, spell: Callable[[int], str]) -> None:
        self.adapter_revision = self.adapter_revision or delta.revision
        self.text += delta.text
        self.token_ids.extend(delta.tokens)
        if self.logprobs is not None:
            self.logprobs.extend(by_token(scores, spell) for scores in delta.logprobs)
            so_far = self.cumulative_logprob or 0.0
            self.cumulative_logprob = so_far + sum(scores.logprob for scores in delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    cache_use: CacheUse | None = None
    """Where those were, and why the rest was computed."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """For each token of the prompt, the first of which has none; None where they were not asked
    for."""
    lora_request: LoRARequest | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs)


def by_token(scores: TokenLogprobs, spell: Callable[[int], str]) -> Logprobs:
    """`spell`: a token's text."""
    found = {scores.token: Logprob(scores.logprob, scores.rank, spell(scores.token))}
    ranked = zip(scores.top_tokens, scores.top_logprobs, strict=True)
    for rank, (token, logprob) in enumerate(ranked, start=1):
        if token not in found:
            found[token] = Logprob(logprob, rank, spell(token))
    return found
