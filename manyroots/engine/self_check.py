"""Checks a sample of cache hits while serving: computes them again and compares (R09).

Takes requests and their first outputs. For a share of those with cached tokens it asks the engine
twice for the next token, once from the cache and once recomputed, with requests of its own. If the
log-probabilities differ by more than rounding allows, it drops the pages on every tier, counts the
difference and logs them. It runs one check at a time; callers never see its requests.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from manyroots.ids import RequestId
from manyroots.messages import FinishReason, Output, StepOutputs, Submit
from manyroots.sampling import SamplingParams
from manyroots.step import TokenLogprobs

logger = logging.getLogger(__name__)

_NUM_COMPARED = 5
"""The most likely tokens, besides the chosen one."""
_MAX_NOTED = 4096
_CACHED = SamplingParams(temperature=0.0, max_tokens=1, logprobs=_NUM_COMPARED)
_COMPUTED = replace(_CACHED, prompt_logprobs=0)
"""Prompts with requested log-probabilities are always recomputed."""


@dataclass(slots=True)
class _Check:
    """One prefix, requested twice."""

    submit: Submit
    waits_for: set[RequestId]
    scores: dict[RequestId, TokenLogprobs] = field(default_factory=dict)
    num_cached_tokens: int = 0
    is_void: bool = False
    """Whether it was abandoned: its answers may come from different weights."""


class SelfCheck:
    """Samples, requests and compares."""

    def __init__(
        self,
        share: float,
        tolerance: float,
        submit: Callable[[Submit], None],
        drop: Callable[[Submit], str],
        seed: int = 0,
    ) -> None:
        """`submit` queues a request. `drop` removes a prompt's pages from every tier and returns
        their hashes. `tolerance`: the allowed difference of log-probabilities."""
        self._share = share
        self._tolerance = tolerance
        self._submit = submit
        self._drop = drop
        self._rng = random.Random(seed)
        self._noted: dict[RequestId, Submit] = {}
        """Sampled requests without output yet."""
        self._check: _Check | None = None
        self._next_id = -1
        self.total_checks = 0
        self.total_differences = 0

    def note(self, submit: Submit) -> None:
        """Note a new request."""
        if self._rng.random() < self._share and len(self._noted) < _MAX_NOTED:
            self._noted[submit.request_id] = submit

    def forget(self, request_id: RequestId) -> None:
        """A request ended before its first token."""
        self._noted.pop(request_id, None)

    def give_up(self) -> list[RequestId]:
        """The weights may change: abandon running checks. Returns their requests."""
        if self._check is None:
            return []
        self._check.is_void = True
        return list(self._check.waits_for)

    def take(self, outputs: StepOutputs) -> None:
        """Start a check of a new hit; hold back outputs that belong to a check."""
        if not self._noted and self._check is None:
            return
        outputs.single_out(self._noted)
        kept: list[Output] = []
        for output in outputs.outputs:
            if output.request_id < 0:
                self._answer(output)
                continue
            kept.append(output)
            submit = self._noted.pop(output.request_id, None)
            if submit is not None and output.num_cached_tokens and self._check is None:
                self._begin(submit, output.num_cached_tokens)
        outputs.outputs[:] = kept

    def _begin(self, submit: Submit, num_cached_tokens: int) -> None:
        cached, computed = RequestId(self._next_id), RequestId(self._next_id - 1)
        self._next_id -= 2
        prompt = submit.prompt[: num_cached_tokens + 1]
        asked = replace(submit, prompt=prompt, seed=0, stop_ids=())
        self._check = _Check(asked, {cached, computed})
        for request_id, sampling in ((cached, _CACHED), (computed, _COMPUTED)):
            self._submit(replace(asked, request_id=request_id, sampling=sampling))

    def _answer(self, output: Output) -> None:
        check = self._check
        if check is None or output.request_id not in check.waits_for:
            return
        if output.logprobs:
            check.scores[output.request_id] = output.logprobs[0]
            check.num_cached_tokens = max(check.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is None:
            return
        check.waits_for.discard(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            check.scores.clear()  # its adapter may be unloaded: nothing to compare
        if check.waits_for:
            return
        self._check = None
        if len(check.scores) == 2 and check.num_cached_tokens and not check.is_void:
            self._compare(check)

    def _compare(self, check: _Check) -> None:
        self.total_checks += 1
        one, other = (_by_token(scores) for scores in check.scores.values())
        far = max((abs(one[t] - other[t]) for t in one.keys() & other.keys()), default=float("inf"))
        if far <= self._tolerance:
            return
        self.total_differences += 1
        logger.error(
            "cached pages differ from computed ones: log-probabilities by %.3g, and %.3g is "
            "allowed. %s dropped, and computed again when wanted",
            far, self._tolerance, self._drop(check.submit),
        )  # fmt: skip


def _by_token(scores: TokenLogprobs) -> dict[int, float]:
    tops = zip(scores.top_tokens, scores.top_logprobs, strict=True)
    return {scores.token: scores.logprob, **dict(tops)}
