"""An engine made of a rule, behind the same seam as the real one.

By default it repeats the prompt, one token per output, until max_tokens; tests give other rules,
hold it at a gate, or let it die.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable

from manyroots.errors import UnavailableError
from manyroots.ids import RequestId
from manyroots.messages import EngineInfo, FinishReason, Output, Stats, Submit
from manyroots.step import TokenLogprobs

Rule = Callable[[Submit], Iterable[Output]]

INFO = EngineInfo(
    model_path="tiny", model_name="tiny", vocab_size=300, max_model_len=512, page_size=16,
    num_pages=1024, max_num_seqs=4, eos_token_ids=(257,), dtype="float32", device="cpu",
)  # fmt: skip


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    others = tuple((token + place) % 256 for place in range(count))
    return TokenLogprobs(
        token, -0.5, 1, others, tuple(-0.5 - place for place in range(len(others)))
    )


def repeat_prompt(submit: Submit) -> Iterable[Output]:
    sampling = submit.sampling
    limit = sampling.max_tokens or 16
    for place, token in zip(range(limit), itertools.cycle(submit.prompt), strict=False):
        is_last = place == limit - 1
        stops = token in submit.stop_ids and place >= sampling.min_tokens
        scores, prompt_scores = [], []
        if sampling.logprobs is not None:
            scores = [logprobs_of(token, sampling.logprobs)]
        if sampling.prompt_logprobs is not None and place == 0:
            count = sampling.prompt_logprobs
            prompt_scores = [logprobs_of(token, count) for token in submit.prompt[1:]]
        finish = FinishReason.STOP if stops else FinishReason.LENGTH if is_last else None
        yield Output(
            submit.request_id, [token], finish, num_cached_tokens=2,
            stop_token=token if stops else None, logprobs=scores, prompt_logprobs=prompt_scores,
        )  # fmt: skip
        if stops:
            return


def script(*tokens: int) -> Rule:
    """These tokens, whatever the prompt, then the end of text."""

    def rule(submit: Submit) -> Iterable[Output]:
        for token in tokens:
            yield Output(submit.request_id, [token], None, 0)
        yield Output(submit.request_id, [257], FinishReason.STOP, 0, stop_token=257)

    return rule


class FakeEngine:
    """Implements `EngineClient`."""

    def __init__(self, rule: Rule = repeat_prompt, info: EngineInfo = INFO) -> None:
        self._info = info
        self._ids = itertools.count(1)
        self.rule = rule
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_alive = True
        self.submitted: list[Submit] = []
        self.running: set[RequestId] = set()
        self.aborted: set[RequestId] = set()
        self.is_closed = False
        self.start_error: Exception | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def stats(self) -> Stats | None:
        held = len(self.running)
        return Stats(held, 0, 1024, 1000, 24 - held, held, 0, 100, 40, 7, 70)

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._ids))

    async def generate(self, request: Submit) -> AsyncIterator[Output]:
        self._check_alive()
        self.submitted.append(request)
        self.running.add(request.request_id)
        finished = False
        try:
            for output in self.rule(request):
                await asyncio.sleep(0)
                await self.gate.wait()
                self._check_alive()
                finished = output.finish_reason is not None
                yield output
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.add(request.request_id)

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise UnavailableError("the engine died")

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error

    async def close(self) -> None:
        self.is_closed = True
        self.is_alive = False
        self.gate.set()
