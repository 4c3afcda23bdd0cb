"""Chooses what each step computes, and updates requests when a step is done.

In: submissions, aborts, results of steps. Out: plans, and outputs of each request. Steps may be
planned before earlier ones are done: a sequence whose next token is still being sampled is planned
by count. Results for a sequence that has ended meanwhile are dropped.

Knows the cache only by its facade, and no tensor, clock or thread. A step that only decodes costs a
few operations on columns (`rows.py`), for any number of rows.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby, islice

from manyroots.cache.cache import PrefixCache
from manyroots.cache.events import CacheEvent
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Extension, Refusal
from manyroots.config import SchedulerSettings
from manyroots.errors import NotFoundError
from manyroots.ids import AdapterDigest, AdapterName, RequestId, StepId, Tier
from manyroots.lora.registry import Hold, Unloaded
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import FinishReason, Output, Stats, StepOutputs, Submit
from manyroots.scheduler.admission import Admission
from manyroots.scheduler.departures import Departures
from manyroots.scheduler.fetches import Fetches
from manyroots.scheduler.inspection import (
    SchedulerInspection,
    TenantNumber,
    WaitingCauses,
    count_by_adapter,
)
from manyroots.scheduler.lanes import Importance
from manyroots.scheduler.one_memory import OneMemory
from manyroots.scheduler.plan_builder import Placer, PlanBuilder
from manyroots.scheduler.policies.choice import make_policy
from manyroots.scheduler.request import Request, State
from manyroots.scheduler.results import Results
from manyroots.scheduler.rows import Int64s, Rows
from manyroots.scheduler.slices import AdapterSlices
from manyroots.scheduler.speculation import DraftSource, Speculation
from manyroots.scheduler.victims import Victims
from manyroots.snapshot import RequestView
from manyroots.step import Plan, StepResult


class Scheduler:
    """Continuous batching with chunked prefill, and retraction under memory pressure."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cache: PrefixCache,
        adapters: Residency,
        *,
        max_model_len: int,
        draft_source: DraftSource | None = None,
        memory: OneMemory | None = None,
    ) -> None:
        """`draft_source`: the source of guesses, if the settings enable them; None for earlier
        text. `memory`: what pages and adapters share; None if either has its own."""
        self._settings = settings
        self._cache = cache
        self.adapters = adapters
        """The contents of their names, and the tiers of their weights."""
        self._memory = memory
        self._max_model_len = max_model_len
        policy = make_policy(settings.scheduling_policy)
        self._importance = policy.importance
        self._rows = Rows(settings.max_num_seqs, cache.page_size)
        self._placer = Placer(settings, cache)
        self._admission = Admission(
            settings, cache, adapters, self._rows, policy, max_model_len=max_model_len
        )
        self.slices: AdapterSlices = self._admission.slices
        """The adapters that run."""
        self._victims = Victims(self._rows, self.slices, cache, policy)
        self._departures = Departures(cache, adapters, self._rows, self._admission, self.slices)
        choice = settings.speculation()
        self._speculation = None if choice is None else Speculation(choice, draft_source)
        self._requests: dict[RequestId, Request] = {}
        """All requests that are unfinished for their callers."""
        self._results = Results(
            self._requests,
            cache,
            adapters,
            self._rows,
            self._admission,
            self.slices,
            self._departures,
            self._speculation,
        )
        self._next_step_id = 1
        self._next_serial = 1
        self._without_room: set[AdapterDigest | None] = set()
        """Adapters whose next request found no room when the last step was planned."""
        self._has_retracted = False
        """Whether requests were retracted when the last step was planned."""

    @property
    def fetches(self) -> Fetches:
        """Requests that wait for storage, and pages kept for them."""
        return self._admission.fetches

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting, running or in flight. Page copies count: they hold both of
        their ends until their end is acknowledged (T11)."""
        return self.is_serving or self._cache.has_transfers or self._cache.has_keeps

    @property
    def is_serving(self) -> bool:
        """Whether anything is left to do besides waiting for page copies."""
        return bool(
            self._requests
            or self._results.in_flight
            or self.adapters.has_intents
            or self.adapters.is_loading
        )

    def release_adapter(self, hold: Hold) -> None:
        """A request that held an adapter will not be submitted. If the adapter was unloaded, it may
        now be freed."""
        self._departures.release(hold)

    def submit(self, submit: Submit, hold: Hold | None = None) -> None:
        """Queue a sequence. The input processor has checked that it can be served at all.

        `hold`: its adapter's content when it arrived. None takes the current content, and raises
        NotFoundError if the adapter is not loaded (any more).
        """
        if submit.request_id in self._requests:
            raise RuntimeError(f"request {submit.request_id} was submitted twice")
        if hold is None and submit.adapter is not None:
            hold = self.adapters.acquire(submit.adapter)
        request = Request(
            submit, self._next_serial, StepId(self._next_step_id), hold, self._cache.page_size
        )
        request.max_num_tokens = min(request.max_num_tokens, self._max_model_len)
        self._next_serial += 1
        self._requests[submit.request_id] = request
        self._admission.queue(request)

    def load_adapter(
        self, name: AdapterName, spec: AdapterSpec, *, path: str, is_pinned: bool = False
    ) -> None:
        """Accept requests for `name` from now on. Its previous content drains."""
        registered = self.adapters.register(name, spec, path=path, is_pinned=is_pinned)
        for freed in registered.freed:
            self._cache.evict_adapter(freed)

    def unload_adapter(self, name: AdapterName) -> Unloaded:
        """Accept no more requests for `name`. What its requests do not hold is freed now, the rest
        when they finish (N12, N13)."""
        unloaded = self.adapters.unload(name)
        digest = unloaded.version.digest
        if unloaded.freed or self.adapters.registry.is_draining(digest):
            self._cache.evict_adapter(digest)
        return unloaded

    @property
    def num_begun(self) -> int:
        """Requests that depend on the current weights: they have pages, or tokens of their answer,
        like retracted ones."""
        waiting = (r for r in self._requests.values() if r.lease is None)
        num_retracted = sum(r.num_tokens > r.num_prompt_tokens for r in waiting)
        return self._cache.num_leases + num_retracted

    def reset_cache(self) -> int:
        """Drop everything that could be reused; returns the number of pages that are free again.
        Requests keep what they hold, but it is no longer findable."""
        if self._speculation is not None:
            self._speculation.forget()
        return self._cache.evict_all().num_freed[0]

    def change_weights(self, identity: bytes) -> int:
        """The weights change; nothing of the old ones is found again, on any tier. No request may
        hold pages. Returns the number of pages that are free again."""
        return self._cache.change_weights(identity).num_freed[0]

    def abort(self, request_id: RequestId) -> Output | None:
        """End a sequence now; None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._results.finish(request, FinishReason.ABORT)

    # Planning

    @property
    def awaits_result(self) -> bool:
        """Whether nothing should be planned before the launched steps are done: guesses follow a
        row's newest token, and how many of them are right is not known before."""
        return (
            self._speculation is not None
            and bool(self._results.in_flight)
            and self._speculation.is_on
        )

    def pass_time(self, now_s: float) -> None:
        """Set the time by the caller's clock; marks of prefixes expire by it."""
        self._cache.pass_time(now_s)

    def schedule(self) -> Plan | None:
        """The next step. None if there is nothing to do right now, or while guesses are being
        checked."""
        speculation = self._speculation
        if speculation is not None and self._results.checks_drafts:
            return None
        builder = PlanBuilder(
            StepId(self._next_step_id), self._settings.max_num_batched_tokens, self._rows
        )
        if self._memory is not None:
            self._memory.balance(self._without_room)
        self._without_room, self._has_retracted = set(), False
        all_run = len(self._requests) == len(self._rows.running)
        if not all_run:
            self._admission.choose_adapters(builder.step_id, self._departures.pause)
        if speculation is not None:
            speculation.choose(self._rows.running, builder.step_id)
            if speculation.is_on:
                self._draft(speculation, builder)
        # Decodes first: a long prompt must not delay running streams.
        growing = builder.decode()
        if not all_run or len(growing) or self._rows.prompts:
            self._place_rest(growing, builder, all_run=all_run)
        copies, keeps = self._cache.take_copies(), self._cache.take_keeps()
        intents = self.adapters.flush()
        is_empty, is_ahead = builder.is_empty, bool(self._results.in_flight)
        waits = is_empty and not is_ahead and self._is_waiting
        if is_empty and not (copies or keeps or intents or waits):
            return None
        self._next_step_id += 1
        lent = () if self._memory is None else self._memory.take_lent()
        num_guesses = 0 if speculation is None else speculation.num_guesses(builder.step_id)
        plan, launched = builder.to_plan(
            copies, intents, waits=waits, num_guesses=num_guesses, keeps=keeps, lent_units=lent
        )
        if speculation is not None:
            launched.is_ahead, launched.may_draft = is_ahead, speculation.is_on
        self._results.in_flight.append(launched)
        self.adapters.step_launched(builder.step_id)
        return plan

    def _place_rest(self, growing: Int64s, builder: PlanBuilder, *, all_run: bool) -> None:
        """After the rows that only decode: place rows that need pages, resume paused requests, and
        start waiting ones. `all_run`: no request waits or is paused."""
        departures, importance = self._departures, self._importance
        without_room = self._without_room
        num_retracted = departures.num_retractions
        prompts = list(self._rows.prompts)
        later: list[Request] = []
        if importance is not None and (len(growing) or prompts):
            later = self._continue_by_importance(growing, builder, importance)
        elif len(growing):
            self._next_pages(growing, builder)
        if self.slices.num_paused_requests:
            self._resume(builder)
        for request in () if importance is not None else prompts:
            self._continue(request, builder)
        make_way = None if importance is None else self._make_way
        if importance is not None:
            for least, yielding in groupby(later, importance):
                if departures.num_retractions == num_retracted:
                    without_room |= self._admission.admit(builder, make_way, least - 1)
                for request in yielding:
                    self._continue(request, builder)
        if not all_run or departures.num_retractions > num_retracted:
            self._admission.lose_patience(builder.step_id)
            if departures.num_retractions == num_retracted:
                without_room |= self._admission.admit(builder, make_way)
            self._admission.fetch(builder.step_id)
            self._admission.prepare_adapters(without_room)
        self._has_retracted = departures.num_retractions > num_retracted

    @property
    def _is_waiting(self) -> bool:
        return self._cache.has_transfers or self.adapters.is_loading

    def _next_pages(self, rows: Int64s, builder: PlanBuilder) -> None:
        """Place decoding rows that have filled their pages: all at once if there is room, otherwise
        one after the other, as far as possible."""
        growing = self._rows.requests_at(rows)
        if len(growing) <= builder.num_tokens_left:
            units = self._cache.next_pages([r.lease for r in growing if r.lease is not None])
            if units is not None:
                builder.next_pages(rows, units)
                return
        if self._importance is not None:
            growing.sort(key=self._importance)
        for request in growing:
            self._continue(request, builder)

    def _draft(self, speculation: Speculation, builder: PlanBuilder) -> None:
        """Place decoding rows whose next tokens can be guessed, unless a guess would displace
        another row's token or take the last pages."""
        running = self._rows.running
        left = speculation.most_tokens(builder.num_tokens_left, len(running))
        for request in running:
            if left < 1 or not self._rows.can_draft(request):
                continue
            row, lease = request.row, request.lease
            assert row is not None
            assert lease is not None
            computed = int(self._rows.computed[row])
            tokens = speculation.draft(request, min(left, self._cache.most_drafts(computed + 1)))
            if not len(tokens):
                continue
            end = computed + 1 + len(tokens)
            extension = self._cache.draft(lease, computed, computed + 1, end, builder.step_id)
            if not isinstance(extension, Refusal):
                builder.grow(row, lease, extension)
                builder.place_draft(row, tokens)
                left -= len(tokens)

    def _continue_by_importance(
        self, growing: Int64s, builder: PlanBuilder, importance: Importance
    ) -> list[Request]:
        """Place all rows that need pages, the most important first: later ones can still be
        preempted for them. Returns, in that order, the prompts that are not placed yet because a
        more important request waits. That request comes first, or a long prompt would take every
        step's budget until its end."""
        if not self._rows.prompts:
            self._next_pages(growing, builder)
            return []
        first = self._admission.most_important(importance)
        members = [*self._rows.requests_at(growing)]
        members += [r for r in self._rows.prompts if importance(r) <= first]
        later = [r for r in self._rows.prompts if importance(r) > first]
        for request in sorted(members, key=importance):
            self._continue(request, builder)
        return sorted(later, key=importance)

    def _continue(self, request: Request, builder: PlanBuilder) -> None:
        """Place a running request's next tokens, and preempt others for room if needed."""
        if request.state is not State.RUNNING:
            return
        row, lease = request.row, request.lease
        assert row is not None
        assert lease is not None
        computed = int(self._rows.computed[row])
        num_tokens = self._placer.chunk(request, lease, computed, builder)
        if num_tokens == 0:
            return
        extension = self._extend(request, lease, computed, computed + num_tokens, builder)
        if extension is not None:
            builder.grow(row, lease, extension)
            self._placer.place(request, lease, computed, num_tokens, builder)

    def _extend(
        self, request: Request, lease: Lease, begin: int, end: int, builder: PlanBuilder
    ) -> Extension | None:
        """Pages for a running request, by preempting others if needed. None if it cannot have them
        now, or was retracted itself."""
        most_tokens = request.max_num_tokens - 1
        extension = self._cache.extend(lease, begin, end, builder.step_id, most_tokens)
        while isinstance(extension, Refusal):
            if not self._admission.give_way() and not self._cache.prefer_own(lease):
                victim = self._victims.for_running(request, builder)
                if victim is None or self._is_alone:
                    return None
                self._retract(victim, builder)
                if victim is request:
                    return None
            extension = self._cache.extend(lease, begin, end, builder.step_id, most_tokens)
        return extension

    def _resume(self, builder: PlanBuilder) -> None:
        """Resume paused requests at their positions, as far as there are rows."""
        for request in self.slices.returning():
            if builder.num_tokens_left == 0:
                return
            lease, computed = request.lease, request.num_computed_tokens
            # It may have been retracted for another, or its last token is not known yet.
            if request.state is not State.PAUSED or request.num_in_flight_tokens:
                continue
            assert lease is not None
            num_tokens = self._placer.chunk(request, lease, computed, builder)
            if self._extend(request, lease, computed, computed + num_tokens, builder) is None:
                return
            if request.hold is not None:
                self._admission.seat(request.hold)
            self.slices.drop(request)
            request.state = State.RUNNING
            request.since = builder.step_id
            row = self._rows.sit(request, computed)
            builder.arrive(request, row, lease, computed)
            self._placer.place(request, lease, computed, num_tokens, builder)

    # Retraction

    def _make_way(self, request: Request, builder: PlanBuilder) -> bool:
        """Retract a request that is less important than one that cannot start; False if there is
        none."""
        victim = self._victims.for_waiting(request, builder)
        if victim is None:
            return False
        self._retract(victim, builder)
        return True

    def _retract(self, victim: Request, builder: PlanBuilder) -> None:
        if victim.row is not None:
            builder.withdraw(victim.row)
        self._departures.retract(victim, builder.step_id)

    @property
    def _is_alone(self) -> bool:
        """Whether only copies in progress hold what the single running request lacks: it waits for
        them."""
        num_begun = len(self._rows.running) + self.slices.num_paused_requests
        return num_begun == 1 and self._cache.has_transfers

    # Results

    def advance(self, result: StepResult, seconds: float = 0.0) -> StepOutputs:
        """A step is done: take its tokens, publish its pages and finish completed requests.
        `seconds`: its duration including planning, without the time that other steps ran; 0 if not
        measured."""
        return self._results.advance(result, seconds)

    @property
    def speculation(self) -> Speculation | None:
        """The speculation state; None if it is disabled."""
        return self._speculation

    def take_arrivals(self, result: StepResult) -> list[Output]:
        """Copies and loads have ended, with or without a step."""
        return self._results.take_arrivals(result)

    def fail_in_flight(self, reason: str) -> list[Output]:
        """Launched steps failed, and none is running any more."""
        return self._results.fail_in_flight(reason)

    def drop_prefix(self, submit: Submit) -> tuple[bytes, ...]:
        """Make the pages of a prompt unfindable, on any tier but storage; returns their hashes.
        None for an unloaded adapter, since its pages are gone, too."""
        try:
            hold = None if submit.adapter is None else self.adapters.acquire(submit.adapter)
        except NotFoundError:
            return ()
        request = Request(submit, 0, StepId(0), hold, self._cache.page_size)
        dropped = self._cache.evict_prefix(request.key, request.tokens)
        if hold is not None:
            self.adapters.release(hold)
        return dropped

    def take_events(self) -> list[CacheEvent]:
        """Pages that became findable, and pages that were removed, since the last call."""
        return self._cache.take_events()

    # Looking

    def inspect(self, tenant: TenantNumber, *, most: int, is_paused: bool) -> list[RequestView]:
        """What each request does and waits for, oldest first, at most `most`."""
        causes = WaitingCauses(is_paused, self._has_retracted, self._without_room, self._importance)
        inspection = SchedulerInspection(self._cache, self._rows, self.adapters, causes, tenant)
        return inspection.views(list(islice(self._requests.values(), most)))

    @property
    def num_requests(self) -> int:
        """Unfinished requests."""
        return len(self._requests)

    def count_by_adapter(self) -> dict[AdapterDigest, Counter[str]]:
        """Requests by adapter and state."""
        return count_by_adapter(self._requests.values())

    def num_pauses(self, digest: AdapterDigest) -> int:
        """How often an adapter's requests were paused together."""
        return self.slices.num_displaced[digest]

    def stats(self) -> Stats:
        cache = self._cache.stats()
        pages = cache.planes[0]
        host = next((plane for plane in cache.planes if plane.tier is Tier.HOST), None)
        on_device = [plane for plane in cache.planes if plane.tier is Tier.DEVICE]
        return Stats(
            num_running=len(self._rows.running),
            num_waiting=len(self._admission),
            num_pages=pages.num_units,
            num_free_pages=pages.num_free,
            num_cached_pages=pages.num_cached,
            num_held_pages=pages.num_held,
            page_usage=max(plane.num_held / plane.num_units for plane in on_device),
            total_retractions=self._departures.num_retractions,
            num_paused=self.slices.num_paused_requests,
            total_pauses=self.slices.total_pauses,
            total_lookup_tokens=cache.total_lookup_tokens,
            total_hit_tokens=cache.total_hit_tokens,
            total_host_hit_tokens=cache.total_host_hit_tokens,
            total_storage_hit_tokens=self._admission.total_storage_hit_tokens,
            num_host_pages=0 if host is None else host.num_units,
            num_cached_host_pages=0 if host is None else host.num_cached,
            total_steps=self._next_step_id - 1,
            total_step_tokens=self._results.total_step_tokens,
            adapters=self.adapters.stats(),
            storage=cache.storage,
            speculation=None if self._speculation is None else self._speculation.stats(),
            missed_tokens=cache.missed_tokens,
            total_skipped_checkpoints=cache.total_skipped_checkpoints,
        )
