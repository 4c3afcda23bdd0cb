"""Chooses what each step computes, and moves requests on when a step is done.

In: submissions, aborts, results of steps. Out: plans, and news of each request. Steps may be
planned before earlier ones are done: a sequence whose next token is still being sampled is
planned by count, and what a step computed for a sequence that turns out to have ended is dropped.

Knows the cache by its facade alone, and no tensor, clock or thread.
"""

from __future__ import annotations

from collections import deque

from manyroots.cache.cache import Ending, Extension, PrefixCache, Refusal
from manyroots.cache.lease import Lease
from manyroots.config import Policy, SchedulerSettings
from manyroots.ids import AdapterDigest, AdapterName, RequestId, Row, StepId, Tier
from manyroots.lora.registry import Unloaded
from manyroots.lora.residency import Residency
from manyroots.messages import FinishReason, Output, Stats, Submit
from manyroots.scheduler.draft import Draft, Part
from manyroots.scheduler.queue import GroupKey, WaitingQueue
from manyroots.scheduler.request import Request, State
from manyroots.scheduler.turns import AdapterTurns, has_aged
from manyroots.step import Plan, StepResult, TokenLogprobs

_OVER = (State.DRAINING, State.FINISHED)


class Scheduler:
    """Continuous batching with chunked prefill, and retraction under memory pressure."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cache: PrefixCache,
        adapters: Residency,
        *,
        max_model_len: int,
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._adapters = adapters
        self._turns = AdapterTurns(adapters, adapters.limits.max_loras)
        self._max_model_len = max_model_len
        self._page_size = cache.page_size
        self._is_fair = settings.scheduling_policy == Policy.FAIR.value
        self._requests: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue(Policy(settings.scheduling_policy))
        self._running: list[Request] = []
        self._fetching: list[Request] = []
        self._loading: list[Request] = []
        self._loaded: deque[Request] = deque()
        self._draining: set[Request] = set()
        self._free_rows = [Row(row) for row in range(settings.max_num_seqs - 1, -1, -1)]
        self._in_flight: deque[tuple[StepId, list[Part]]] = deque()
        self._next_step_id = 1
        self._next_serial = 1
        self._total_retractions = 0
        self._total_step_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting, running, in flight or on its way."""
        return bool(
            self._requests
            or self._in_flight
            or self._adapters.has_intents
            or self._adapters.is_loading
        )

    def submit(self, submit: Submit) -> None:
        """Queue a sequence. The door has checked that it can be served at all.

        Raises NotFoundError for an adapter that is not loaded (any more).
        """
        if submit.request_id in self._requests:
            raise RuntimeError(f"request {submit.request_id} was submitted twice")
        hold = None if submit.adapter is None else self._adapters.acquire(submit.adapter)
        request = Request(
            submit, self._next_serial, StepId(self._next_step_id), hold, self._page_size
        )
        request.max_num_tokens = min(request.max_num_tokens, self._max_model_len)
        self._next_serial += 1
        self._requests[submit.request_id] = request
        if not request.wants_prompt_logprobs:
            request.ticket = self._cache.prefetch(request.key, request.tokens)
        if request.ticket is None:
            self._waiting.push(request)
        else:
            # Storage answers while others run; only this request waits for it (T04).
            request.state = State.FETCHING
            self._fetching.append(request)

    def load_adapter(
        self,
        name: AdapterName,
        digest: AdapterDigest,
        *,
        path: str,
        rank: int,
        num_bytes: int,
        invocation_tokens: tuple[int, ...] | None = None,
        is_pinned: bool = False,
    ) -> None:
        """Take requests for `name` from now on. Whatever it meant before drains."""
        registered = self._adapters.register(
            name,
            digest,
            path=path,
            rank=rank,
            num_bytes=num_bytes,
            invocation_tokens=invocation_tokens,
            is_pinned=is_pinned,
        )
        for freed in registered.freed:
            self._cache.evict_adapter(freed)

    def unload_adapter(self, name: AdapterName) -> Unloaded:
        """Take no more requests for `name`. What its requests do not hold is freed now, the rest
        when they are over (N12, N13)."""
        unloaded = self._adapters.unload(name)
        digest = unloaded.version.digest
        if unloaded.freed or self._adapters.registry.is_draining(digest):
            self._cache.evict_adapter(digest)
        return unloaded

    def whereabouts(self, name: AdapterName) -> Tier:
        """Where the weights are of an adapter that is loaded."""
        return self._adapters.whereabouts(name)

    def abort(self, request_id: RequestId) -> Output | None:
        """End a sequence now; None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._finish(request, FinishReason.ABORT)

    # Planning

    def schedule(self) -> Plan | None:
        """The next step, or None if there is nothing to do right now."""
        draft = Draft(StepId(self._next_step_id), self._settings.max_num_batched_tokens)
        num_retracted = self._total_retractions
        # Decodes first: a long prompt must not hold up the tokens of those who are talking.
        for request in self._decode(draft):
            self._continue(request, draft)
        without_room: set[GroupKey] = set()
        if self._total_retractions == num_retracted:
            self._admit(draft, without_room)
        self._turns.prepare(self._waiting, without_room, draft.step_id)
        copies = self._cache.take_copies()
        intents = self._adapters.flush()
        is_waiting = self._cache.has_transfers or self._adapters.is_loading
        waits = not draft.parts and not self._in_flight and is_waiting
        if not draft.parts and not copies and not intents and not waits:
            return None
        self._next_step_id += 1
        self._in_flight.append((draft.step_id, draft.parts))
        self._adapters.step_launched(draft.step_id)
        return draft.to_plan(copies, intents, waits=waits)

    def _decode(self, draft: Draft) -> list[Request]:
        """Place every running request that needs one token and nothing of the cache; gives the
        others in the order in which they should continue."""
        page_crossings: list[Request] = []
        prompts: list[Request] = []
        for request in self._running:
            num_known = request.num_tokens + request.num_pending_tokens
            computed = request.num_computed_tokens
            lease, row = request.lease, request.row
            assert lease is not None
            assert row is not None
            if num_known - computed > 1:
                prompts.append(request)
            elif num_known >= request.max_num_tokens:
                continue  # the token under way is its last
            elif computed >= lease.num_covered_tokens:
                page_crossings.append(request)
            elif draft.num_tokens_left > 0:
                draft.decode(request, row)
        return page_crossings + prompts

    def _continue(self, request: Request, draft: Draft) -> None:
        """Place a running request's next tokens, making room at others' cost if need be."""
        if request.state is not State.RUNNING:
            return
        num_tokens = self._chunk(request, draft)
        if num_tokens == 0:
            return
        extension = self._extend(request, num_tokens, draft)
        while isinstance(extension, Refusal):
            victim = self._victim(draft)
            if victim is None:
                return
            self._retract(victim)
            if victim is request:
                return
            extension = self._extend(request, num_tokens, draft)
        assert request.row is not None
        draft.grow(request.row, extension)
        self._place(request, num_tokens, draft)

    def _extend(self, request: Request, num_tokens: int, draft: Draft) -> Extension | Refusal:
        assert request.lease is not None
        computed = request.num_computed_tokens
        return self._cache.extend(request.lease, computed, computed + num_tokens, draft.step_id)

    def _admit(self, draft: Draft, without_room: set[GroupKey]) -> None:
        """Start those whose units have arrived, then waiting requests in order, until one does
        not fit. All that may begin are claimed before any is given room (C01)."""
        while self._loaded and self._free_rows and draft.num_tokens_left > 0:
            if not self._begin_loaded(draft):
                return
        closed = self._turns.closed_groups(self._waiting, draft.step_id)
        while claimed := self._claim(draft, closed):
            for index, request in enumerate(claimed):
                if self._begin(request, draft):
                    continue
                # It may be the claims behind it that are in its way.
                self._give_up(claimed[index + 1 :])
                if self._begin(request, draft):
                    break
                self._give_up([request])
                if has_aged(request, draft.step_id) or not self._free_rows:
                    return
                # Its adapter's turn is not now; that is no reason to hold back others (L03).
                closed.add(request.group)
                without_room.add(request.group)
                break

    def _begin_loaded(self, draft: Draft) -> bool:
        request = self._loaded.popleft()
        if self._begin(request, draft):
            return True
        if self._running or draft.parts or self._in_flight:
            self._loaded.appendleft(request)  # what runs will make room
            return False
        # Nothing will make room but the others that hold what they have loaded.
        self._give_up([*self._loaded])
        self._loaded.clear()
        if self._begin(request, draft):
            return True
        self._give_up([request])
        return False

    def _claim(self, draft: Draft, closed: set[GroupKey]) -> list[Request]:
        """Take requests off the queue, with what is found for them, as many as may fit."""
        claimed: list[Request] = []
        num_tokens_left = draft.num_tokens_left
        while len(claimed) < len(self._free_rows) and num_tokens_left > 0:
            group = self._waiting.next_group(
                lambda group: group.key not in closed, self._turns.is_on_device
            )
            if group is None:
                break
            if group.head.num_in_flight > 0:
                closed.add(group.key)  # retracted a moment ago: its last token is not known yet
                continue
            request = self._waiting.pop(group)
            lease = self._find(request)
            num_tokens_left -= request.num_tokens - lease.num_cached_tokens
            claimed.append(request)
        return claimed

    def _find(self, request: Request) -> Lease:
        request.lease = self._cache.claim(
            request.key,
            request.tokens,
            request.num_tokens,
            may_reuse=not request.wants_prompt_logprobs,
        )
        return request.lease

    def _give_up(self, claimed: list[Request]) -> None:
        """Claims of requests that do not fit are given back (C03)."""
        for request in reversed(claimed):
            if request.lease is not None:
                self._cache.release(request.lease, Ending.DROPPED)
                request.lease = None
            request.state = State.WAITING
            self._waiting.push(request)

    def _begin(self, request: Request, draft: Draft) -> bool:
        """Start a claimed request, or start loading what it found; False if there is no room."""
        lease = request.lease
        assert lease is not None
        if self._cache.could_find_more(lease, request.tokens):
            self._cache.release(lease, Ending.DROPPED)
            lease = self._find(request)
        if not self._free_rows or draft.num_tokens_left == 0 or not self._turns.may_begin(request):
            return False
        if lease.onboarding:
            if self._cache.onboard(lease) is Refusal.NO_ROOM:
                return False
            request.state = State.LOADING
            self._loading.append(request)
            return True
        # With others running, begin only what could finish its prompt and a page of output:
        # beginning with less would end in retracting it again.
        if self._running and not self._cache.fits(
            lease, min(request.num_tokens + self._cache.page_size, self._max_model_len)
        ):
            return False
        request.num_computed_tokens = request.num_committed_tokens = lease.num_cached_tokens
        num_tokens = self._chunk(request, draft)
        if isinstance(self._extend(request, num_tokens, draft), Refusal):
            return False
        self._start(request, lease, draft)
        self._place(request, num_tokens, draft)
        return True

    def _start(self, request: Request, lease: Lease, draft: Draft) -> None:
        if request.hold is not None:
            self._adapters.seat(request.hold)
        self._running.append(request)
        request.state = State.RUNNING
        request.row = self._free_rows.pop()
        request.prompt_logprobs.clear()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = lease.num_cached_tokens
        if not request.wants_prompt_logprobs:
            self._cache.count_hit(lease, request.num_tokens)
        draft.arrive(request, request.row, lease)

    def _place(self, request: Request, num_tokens: int, draft: Draft) -> None:
        assert request.lease is not None
        draft.place(request, num_tokens)
        self._cache.announce(
            request.lease, request.tokens, request.num_computed_tokens, draft.step_id
        )

    def _chunk(self, request: Request, draft: Draft) -> int:
        """How many of its tokens a request may compute in this step."""
        assert request.lease is not None
        num_tokens = min(request.num_tokens_to_compute, draft.num_tokens_left)
        if self._settings.long_prefill_token_threshold is not None:
            num_tokens = min(num_tokens, self._settings.long_prefill_token_threshold)
        return self._cache.clip(request.lease, request.num_computed_tokens, num_tokens)

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
        self._give_back(request, Ending.DROPPED)
        request.state = State.WAITING
        request.waiting_since = StepId(self._next_step_id)
        self._waiting.push(request)
        self._total_retractions += 1

    def _give_back(self, request: Request, ending: Ending) -> None:
        assert request.lease is not None
        assert request.row is not None
        self._cache.release(request.lease, ending)
        if request.hold is not None:
            self._adapters.unseat(request.hold)
        self._free_rows.append(request.row)
        request.lease = request.row = None

    # Results

    def advance(self, result: StepResult) -> list[Output]:
        """A step is done: take its tokens, publish its pages, finish who is finished."""
        step_id, parts = self._in_flight.popleft()
        if step_id != result.step_id:
            raise RuntimeError(f"result of step {result.step_id} came in place of {step_id}'s")
        self._cache.commit_step(step_id)
        self._adapters.step_done(step_id)
        outputs = self.take_arrivals(result)
        faults = {fault.row: fault.reason for fault in result.faults}
        tokens = iter(result.tokens.tolist())
        for request, row, num_tokens, samples in parts:
            request.num_in_flight -= 1
            self._total_step_tokens += num_tokens
            token = next(tokens) if samples else None
            if self._is_fair:
                self._waiting.serve(request.group, num_tokens)
            if request.state in _OVER:
                # The step that was under way when it ended computed its last token's page.
                self._commit(request, num_tokens, step_id)
                self._drained(request)
                continue
            if row in faults:
                outputs.append(self._finish(request, FinishReason.ERROR, faults[row]))
                continue
            if row in result.prompt_logprobs:
                request.prompt_logprobs.extend(result.prompt_logprobs[row])
            if token is not None:
                request.num_pending_tokens -= 1
                request.append(token)
            self._commit(request, num_tokens, step_id)
            if token is not None:
                outputs.append(self._report(request, token, result.logprobs.get(row)))
        return outputs

    def take_arrivals(self, result: StepResult) -> list[Output]:
        """Copies and loads have ended: requests whose units are all there can begin; those whose
        adapter could not be loaded fail with the reason (W10)."""
        outputs: list[Output] = []
        for loaded in result.adapters:
            outcome = self._adapters.acknowledge(loaded)
            if outcome.error is not None:
                reason = f"the adapter could not be loaded: {outcome.error}"
                for group in self._waiting.groups():
                    if group.key[0] == outcome.digest:
                        outputs += [self._finish(r, FinishReason.ERROR, reason) for r in group]
        for done in result.copies:
            self._cache.acknowledge(done)
        if result.copies:
            self._sort_fetching()
            self._sort_loading()
        return outputs

    def _sort_fetching(self) -> None:
        still_fetching: list[Request] = []
        for request in self._fetching:
            if request.ticket is not None and not request.ticket.is_done:
                still_fetching.append(request)
                continue
            request.ticket = None
            request.state = State.WAITING
            self._waiting.push(request)
        self._fetching = still_fetching

    def _sort_loading(self) -> None:
        still_loading: list[Request] = []
        for request in self._loading:
            lease = request.lease
            assert lease is not None
            if not lease.is_ready:
                still_loading.append(request)
            elif lease.has_failed:
                self._cache.release(lease, Ending.DROPPED)
                request.lease = None
                request.state = State.WAITING
                self._waiting.push(request)
            else:
                self._loaded.append(request)
        self._loading = still_loading

    def _commit(self, request: Request, num_tokens: int, step_id: StepId) -> None:
        """Publish pages whose tokens were not all known when the step was planned."""
        lease = request.lease
        if lease is None:  # retracted since
            return
        request.num_committed_tokens += num_tokens
        num_pages = request.num_committed_tokens // self._page_size
        if num_pages > lease.num_published_pages or lease.checkpoints:
            self._cache.commit(lease, request.tokens, request.num_committed_tokens, step_id)

    def _report(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Output:
        """News of a request's newest token, which may be its last."""
        reason: FinishReason | None = None
        stop_token: int | None = None
        if token in request.stop_ids and (
            request.num_output_tokens > request.submit.sampling.min_tokens
        ):
            reason, stop_token = FinishReason.STOP, token
        elif request.num_pending_tokens == 0 and request.num_tokens >= request.max_num_tokens:
            reason = FinishReason.LENGTH
        output = Output(
            request.submit.request_id, [token], reason, request.num_cached_tokens or 0, stop_token
        )
        if logprobs is not None:
            output.logprobs.append(logprobs)
        if request.prompt_logprobs and request.num_output_tokens == 1:
            output.prompt_logprobs.extend(request.prompt_logprobs)
            request.prompt_logprobs.clear()
        if reason is not None:
            self._finish(request, reason)
        return output

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        """The request is over for its caller; its pages go when no launched step writes them."""
        del self._requests[request.submit.request_id]
        if request.state is State.WAITING:
            self._waiting.remove(request)
            request.state = State.FINISHED
        elif request.state is State.FETCHING:
            self._fetching.remove(request)
            request.state = State.FINISHED
        elif request.state is State.LOADING:
            # What is on its way is held by the transfer, not by the lease (T08).
            (self._loading if request in self._loading else self._loaded).remove(request)
            assert request.lease is not None
            self._cache.release(request.lease, Ending.DROPPED)
            request.lease = None
            request.state = State.FINISHED
        else:
            self._running.remove(request)
            request.state = State.DRAINING
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                request.ending = Ending.FINISHED
            self._draining.add(request)
            self._drained(request)
        if request.state is State.FINISHED:
            self._let_go(request)
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
            self._give_back(request, request.ending)
            request.state = State.FINISHED
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """A request is over: its adapter may be, too, and then so are its pages."""
        hold, request.hold = request.hold, None
        if hold is not None:
            for digest in self._adapters.release(hold):
                self._cache.evict_adapter(digest)

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
        # Those that wait for their units may have found pages that were never filled.
        self._give_up([*self._loading, *self._loaded])
        self._loading.clear()
        self._loaded.clear()
        for step_id, _ in steps:
            self._adapters.step_done(step_id)
        for step_id, _ in reversed(steps):
            self._cache.fail_step(step_id)
        return outputs

    def stats(self) -> Stats:
        cache = self._cache.stats()
        pages = cache.planes[0]
        return Stats(
            num_running=len(self._running),
            num_waiting=len(self._waiting)
            + len(self._fetching)
            + len(self._loading)
            + len(self._loaded),
            num_pages=pages.num_units,
            num_free_pages=pages.num_free,
            num_cached_pages=pages.num_cached,
            num_held_pages=pages.num_held,
            total_retractions=self._total_retractions,
            total_lookup_tokens=cache.total_lookup_tokens,
            total_hit_tokens=cache.total_hit_tokens,
            total_steps=self._next_step_id - 1,
            total_step_tokens=self._total_step_tokens,
            adapters=self._adapters.stats(),
        )
