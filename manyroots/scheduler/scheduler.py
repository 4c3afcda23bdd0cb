"""Chooses what each step computes, and moves requests on when a step is done.

In: submissions, aborts, results of steps. Out: plans, and news of each request. Steps may be
planned before earlier ones are done: a sequence whose next token is still being sampled is
planned by count, and what a step computed for a sequence that turns out to have ended is dropped.

Knows the cache by its facade alone, and no tensor, clock or thread.
"""

from __future__ import annotations

from collections import deque

from manyroots.cache.cache import Demand, PrefixCache, Refusal
from manyroots.cache.lease import Lease
from manyroots.config import SchedulerSettings
from manyroots.ids import RequestId, Row, StepId
from manyroots.messages import FinishReason, Output, Stats, Submit
from manyroots.scheduler.draft import Draft, Part
from manyroots.scheduler.request import Request, State
from manyroots.step import Plan, StepResult, TokenLogprobs


class Scheduler:
    """First come, first served, with chunked prefill and retraction under memory pressure."""

    def __init__(
        self, settings: SchedulerSettings, cache: PrefixCache, *, max_model_len: int
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._max_model_len = max_model_len
        self._requests: dict[RequestId, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._draining: set[Request] = set()
        self._free_rows = [Row(row) for row in range(settings.max_num_seqs - 1, -1, -1)]
        self._in_flight: deque[tuple[StepId, list[Part]]] = deque()
        self._next_step_id = 1
        self._total_retractions = 0
        self._total_step_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting, running or in flight."""
        return bool(self._requests or self._in_flight)

    def submit(self, submit: Submit) -> None:
        """Queue a sequence. The door has checked that it can be served at all."""
        if submit.request_id in self._requests:
            raise RuntimeError(f"request {submit.request_id} was submitted twice")
        request = Request(submit)
        self._requests[submit.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: RequestId) -> Output | None:
        """End a sequence now; None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._finish(request, FinishReason.ABORT)

    # Planning

    def schedule(self) -> Plan | None:
        """The next step, or None if there is nothing to compute right now."""
        draft = Draft(StepId(self._next_step_id), self._settings.max_num_batched_tokens)
        num_retracted = self._total_retractions
        # Decodes first: a long prompt must not hold up the tokens of those who are talking.
        for request in [r for r in self._running if r.num_tokens_to_compute == 1]:
            self._continue(request, draft)
        for request in [r for r in self._running if r.num_tokens_to_compute > 1]:
            self._continue(request, draft)
        if self._total_retractions == num_retracted:
            self._admit(draft)
        if not draft.parts:
            return None
        self._next_step_id += 1
        self._in_flight.append((draft.step_id, draft.parts))
        return draft.to_plan()

    def _continue(self, request: Request, draft: Draft) -> None:
        """Place a running request's next tokens, making room at others' cost if need be."""
        num_tokens = self._chunk(request.num_tokens_to_compute, draft)
        if request.state is not State.RUNNING or num_tokens == 0 or self._is_at_limit(request):
            return
        lease, row = request.lease, request.row
        assert lease is not None
        assert row is not None
        first = len(lease.pages)
        pages = self._cache.extend(lease, request.num_computed_tokens + num_tokens)
        while isinstance(pages, Refusal):
            victim = self._victim(draft)
            if victim is None:
                return
            self._retract(victim)
            if victim is request:
                return
            pages = self._cache.extend(lease, request.num_computed_tokens + num_tokens)
        draft.grow(row, first, pages)
        self._place(request, num_tokens, draft)

    def _admit(self, draft: Draft) -> None:
        """Start waiting requests in order, until one does not fit."""
        while self._waiting and self._free_rows and draft.num_tokens_left > 0:
            request = self._waiting[0]
            if request.num_in_flight > 0:
                return  # retracted a moment ago: its last token is not known yet
            lease = self._reserve(request, draft)
            if isinstance(lease, Refusal):
                return
            self._waiting.popleft()
            self._start(request, lease, draft)

    def _reserve(self, request: Request, draft: Draft) -> Lease | Refusal:
        # With others running, begin only what could finish its prompt and a page of output:
        # beginning with less would end in retracting it again.
        must_fit = request.num_tokens + self._cache.page_size if self._running else 0
        return self._cache.reserve(
            Demand(
                namespace=request.submit.namespace,
                tokens=request.tokens,
                max_new_tokens=self._chunk(request.num_tokens, draft),
                may_reuse=not request.wants_prompt_logprobs,
                num_must_fit_tokens=must_fit,
            )
        )

    def _start(self, request: Request, lease: Lease, draft: Draft) -> None:
        self._running.append(request)
        request.state = State.RUNNING
        request.lease = lease
        request.row = self._free_rows.pop()
        request.num_computed_tokens = request.num_committed_tokens = lease.num_cached_tokens
        request.prompt_logprobs.clear()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = lease.num_cached_tokens
        draft.arrive(request, request.row, lease)
        self._place(request, self._chunk(request.num_tokens_to_compute, draft), draft)

    def _place(self, request: Request, num_tokens: int, draft: Draft) -> None:
        assert request.lease is not None
        draft.place(request, num_tokens)
        self._cache.announce(
            request.lease, request.tokens, request.num_computed_tokens, draft.step_id
        )

    def _chunk(self, num_tokens: int, draft: Draft) -> int:
        cap = self._settings.long_prefill_token_threshold or num_tokens
        return min(num_tokens, cap, draft.num_tokens_left)

    def _is_at_limit(self, request: Request) -> bool:
        """Whether the tokens under way are the last it may have."""
        max_tokens = request.submit.sampling.max_tokens
        num_output = request.num_output_tokens + request.num_pending_tokens
        num_tokens = request.num_tokens + request.num_pending_tokens
        return num_tokens >= self._max_model_len or (
            max_tokens is not None and num_output >= max_tokens
        )

    # Retraction

    def _victim(self, draft: Draft) -> Request | None:
        """The request that began last, of those not placed in this step yet."""
        placed = {part.request for part in draft.parts}
        for request in reversed(self._running):
            if request not in placed:
                return request
        return None

    def _retract(self, request: Request) -> None:
        """Back to the head of the queue. What it published stays findable, so that it resumes
        from there; its draws depend on (seed, position), so its tokens stay the same."""
        self._running.remove(request)
        self._give_back(request)
        request.state = State.WAITING
        self._waiting.appendleft(request)
        self._total_retractions += 1

    def _give_back(self, request: Request) -> None:
        assert request.lease is not None
        assert request.row is not None
        self._cache.release(request.lease)
        self._free_rows.append(request.row)
        request.lease = request.row = None

    # Results

    def advance(self, result: StepResult) -> list[Output]:
        """A step is done: take its tokens, publish its pages, finish who is finished."""
        step_id, parts = self._in_flight.popleft()
        if step_id != result.step_id:
            raise RuntimeError(f"result of step {result.step_id} came in place of {step_id}'s")
        self._cache.commit_step(step_id)
        faults = {fault.row: fault.reason for fault in result.faults}
        tokens = iter(result.tokens.tolist())
        outputs: list[Output] = []
        for part in parts:
            request = part.request
            request.num_in_flight -= 1
            self._total_step_tokens += part.num_tokens
            token = next(tokens) if part.samples else None
            if request.state in (State.DRAINING, State.FINISHED):
                self._drained(request)
                continue
            if part.row in faults:
                outputs.append(self._finish(request, FinishReason.ERROR, faults[part.row]))
                continue
            request.prompt_logprobs.extend(result.prompt_logprobs.get(part.row, ()))
            if token is not None:
                request.num_pending_tokens -= 1
                request.append(token)
            self._commit(request, part.num_tokens, step_id)
            if token is not None:
                outputs.append(self._report(request, token, result.logprobs.get(part.row)))
        return outputs

    def _commit(self, request: Request, num_tokens: int, step_id: StepId) -> None:
        """Publish pages whose tokens were not all known when the step was planned."""
        if request.lease is not None:  # not retracted since
            request.num_committed_tokens += num_tokens
            self._cache.commit(request.lease, request.tokens, request.num_committed_tokens, step_id)

    def _report(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Output:
        """News of a request's newest token, which may be its last."""
        sampling = request.submit.sampling
        reason: FinishReason | None = None
        if token in request.stop_ids and request.num_output_tokens > sampling.min_tokens:
            reason = FinishReason.STOP
        elif request.num_pending_tokens == 0 and self._is_at_limit(request):
            reason = FinishReason.LENGTH
        prompt_logprobs: list[TokenLogprobs] = []
        if request.num_output_tokens == 1:
            prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        if reason is not None:
            self._finish(request, reason)
        return Output(
            request_id=request.submit.request_id,
            tokens=[token],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            stop_token=token if reason is FinishReason.STOP else None,
            logprobs=[] if logprobs is None else [logprobs],
            prompt_logprobs=prompt_logprobs,
        )

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        """The request is over for its caller; its pages go when no launched step writes them."""
        del self._requests[request.submit.request_id]
        if request.state is State.WAITING:
            self._waiting.remove(request)
            request.state = State.FINISHED
        else:
            self._running.remove(request)
            request.state = State.DRAINING
            self._draining.add(request)
            self._drained(request)
        return Output(
            request_id=request.submit.request_id,
            tokens=[],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            error=error,
        )

    def _drained(self, request: Request) -> None:
        if request.state is State.DRAINING and request.num_in_flight == 0:
            self._draining.remove(request)
            self._give_back(request)
            request.state = State.FINISHED

    def fail_in_flight(self, reason: str) -> list[Output]:
        """Launched steps gave nothing, and none is running any more.

        Their requests fail; those of later steps too, since they may have relied on pages that
        were never filled. Nobody else is touched.
        """
        steps = list(self._in_flight)
        self._in_flight.clear()
        outputs: list[Output] = []
        for _, parts in steps:
            for part in parts:
                request = part.request
                request.num_in_flight = 0
                if request.submit.request_id in self._requests:
                    outputs.append(self._finish(request, FinishReason.ERROR, reason))
                else:
                    self._drained(request)
        for step_id, _ in reversed(steps):
            self._cache.fail_step(step_id)
        return outputs

    def stats(self) -> Stats:
        cache = self._cache.stats()
        return Stats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=cache.num_pages,
            num_free_pages=cache.num_free,
            num_cached_pages=cache.num_cached,
            num_held_pages=cache.num_held,
            total_retractions=self._total_retractions,
            total_lookup_tokens=cache.total_lookup_tokens,
            total_hit_tokens=cache.total_hit_tokens,
            total_steps=self._next_step_id - 1,
            total_step_tokens=self._total_step_tokens,
        )
