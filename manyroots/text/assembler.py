"""Turns the engine's outputs of one sequence into the text that its caller sees.

Takes `Output`s in order; gives `TextDelta`s. Ends the text at a stop string, and then says so:
the owner must abort the sequence in the engine. Synchronous; knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from manyroots.messages import CacheUse, DraftUse, FinishReason, Output
from manyroots.sampling import SamplingParams
from manyroots.step import TokenLogprobs
from manyroots.text.detokenizer import detokenizer_for
from manyroots.text.stops import StopChecker
from manyroots.text.tokenizer import Tokenizer

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class TextDelta:
    """What one `Output` added to a sequence. Not frozen, because a step makes hundreds; none
    changes after it has been handed on."""

    text: str
    """May lag `tokens`: unfinished characters and possible stop strings are held back."""
    tokens: list[int]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    stop_reason: str | int | None = None
    """The stop string or the caller's stop token that ended the sequence; None for the model's
    own end of text."""
    stopped: bool = False
    """A stop string was found while the engine still runs the sequence: abort it there."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """With logprobs: for each token, how many characters of the text come before it."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    cache_use: CacheUse | None = None
    """With the first tokens."""
    revision: str | None = None
    """With the first tokens of an adapter's sequence."""
    drafts: DraftUse | None = None
    """With tokens whose step checked guesses."""


class TextAssembler:
    """One sequence's text, from its first token to its last."""

    __slots__ = (
        "_detokenizer", "_finished", "_is_plain", "_length", "_num_tokens", "_sampling", "_stops",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids`: special tokens that are part of the text all the same, for a format that
        reads it."""
        self._sampling = sampling
        self._detokenizer = detokenizer_for(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, shown_ids=shown_ids
        )
        self._stops = StopChecker(
            sampling.stop, include_in_output=sampling.include_stop_str_in_output
        )
        self._is_plain = not sampling.stop and sampling.logprobs is None
        self._num_tokens = 0
        self._length = 0
        self._finished = False

    def push(self, output: Output) -> TextDelta:
        """Take the next output. After a delta with a finish reason there must be no more."""
        assert not self._finished, "push after the end of a sequence"
        if self._is_plain and output.finish_reason is None and output.notice is None:
            return self._plain(output)
        pieces: list[str] = []
        offsets: list[int] = []
        stop: str | None = None
        taken = 0
        for token in output.tokens:
            taken += 1
            offsets.append(self._length)
            is_stop_token = output.stop_token is not None and taken == len(output.tokens)
            checked, stop = self._take(token, hide=is_stop_token)
            pieces.append(checked)
            if stop is not None:
                break
        reason = FinishReason.STOP if stop is not None else output.finish_reason
        if reason is not None:
            self._finished = True
            if stop is None:
                tail, stop = self._finish(ends_itself=reason in _OWN_ENDS)
                pieces.append(tail)
                if stop is not None:
                    reason = FinishReason.STOP
        wants_logprobs = self._sampling.logprobs is not None
        return TextDelta(
            text="".join(pieces),
            tokens=output.tokens[:taken],
            finish_reason=reason,
            num_cached_tokens=output.num_cached_tokens,
            stop_reason=stop if stop is not None else self._callers_stop_token(output),
            stopped=stop is not None and output.finish_reason is None,
            logprobs=output.logprobs[:taken] if wants_logprobs else [],
            offsets=offsets if wants_logprobs else [],
            prompt_logprobs=output.prompt_logprobs,
            error=output.error,
            cache_use=output.cache_use,
            revision=output.revision,
            drafts=None if output.drafts is None else _within(output.drafts, taken),
        )

    def _plain(self, output: Output) -> TextDelta:
        """Nothing can end here and nothing is scored: most outputs of most sequences."""
        push, tokens = self._detokenizer.push, output.tokens
        text = push(tokens[0]) if len(tokens) == 1 else "".join([push(token) for token in tokens])
        self._num_tokens += len(tokens)
        self._length += len(text)
        return TextDelta(
            text, tokens, None, output.num_cached_tokens, prompt_logprobs=output.prompt_logprobs
        )

    def _take(self, token: int, *, hide: bool) -> tuple[str, str | None]:
        self._num_tokens += 1
        if hide and not self._sampling.include_stop_str_in_output:
            return "", None
        text = self._detokenizer.push(token)
        self._length += len(text)
        may_stop = self._num_tokens > self._sampling.min_tokens
        checked = self._stops.push(text, may_stop=may_stop)
        return checked.text, checked.stop

    def _finish(self, *, ends_itself: bool) -> tuple[str, str | None]:
        """The text still underway at the end, which may complete a stop string; but not of a
        sequence that was cut off, which must not be told as one that ended."""
        may_stop = ends_itself and self._num_tokens > self._sampling.min_tokens
        checked = self._stops.push(self._detokenizer.flush(), may_stop=may_stop)
        if checked.stop is not None:
            return checked.text, checked.stop
        return checked.text + self._stops.flush(), None

    def _callers_stop_token(self, output: Output) -> int | None:
        """As in vLLM: the model's own end of text is no reason worth naming."""
        named = output.stop_token in self._sampling.stop_token_ids
        return output.stop_token if named else None


def _within(drafts: DraftUse, num_tokens: int) -> DraftUse:
    """Guesses after a stop string are no part of the text, and so not accepted."""
    return replace(drafts, num_accepted_tokens=min(drafts.num_accepted_tokens, num_tokens))
