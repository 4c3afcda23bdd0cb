"""Updates requests when a step is done: their tokens, their pages, their ends.

In: results of steps, in the order of their plans, or the failure of steps. Out: outputs for the
callers of requests. Results for a sequence that has ended since are dropped.

Nearly all rows of a step simply continue, and are handled as columns (`rows.py`); only the others
are handled one by one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from manyroots.cache.cache import PrefixCache
from manyroots.ids import RequestId, Row, StepId
from manyroots.lora.residency import Residency
from manyroots.messages import (
    DraftUse,
    ErrorKind,
    FinishReason,
    Notice,
    Output,
    StepOutputs,
    Tokens,
)
from manyroots.scheduler.admission import Admission
from manyroots.scheduler.departures import Departures
from manyroots.scheduler.plan_builder import Launched
from manyroots.scheduler.request import Request, State
from manyroots.scheduler.rows import Int64s, Rows
from manyroots.scheduler.slices import AdapterSlices
from manyroots.scheduler.speculation import Speculation
from manyroots.step import Bools, Int32s, StepResult, TokenLogprobs

PROMPT_SHARE = 8
"""A step with at least this many tokens per row shows how fast prompts are computed. With fewer,
most of its time is the fixed cost of a step."""


class Results:
    """Handles the results of launched steps."""

    def __init__(
        self,
        requests: dict[RequestId, Request],
        cache: PrefixCache,
        adapters: Residency,
        rows: Rows,
        admission: Admission,
        slices: AdapterSlices,
        departures: Departures,
        speculation: Speculation | None = None,
    ) -> None:
        """`requests`: the scheduler's; finished ones are removed. `speculation`: None if nothing is
        guessed."""
        self._requests = requests
        self._cache = cache
        self._adapters = adapters
        self._rows = rows
        self._admission = admission
        self._slices = slices
        self._departures = departures
        self._speculation = speculation
        self._charges_tokens = admission.waiting.policy.charges_tokens
        self.in_flight: deque[Launched] = deque()
        """Launched steps that are not done, in order."""
        self.total_step_tokens = 0

    @property
    def checks_drafts(self) -> bool:
        """Whether a launched step checks guesses."""
        return any(step.drafts for step in self.in_flight)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        """A request is finished without another token; returns its last output."""
        self._end(request, reason)
        return Output(
            request_id=request.submit.request_id,
            tokens=[],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            error=error,
        )

    def _end(self, request: Request, reason: FinishReason) -> None:
        del self._requests[request.submit.request_id]
        if self._speculation is not None and reason is not FinishReason.ERROR:
            self._speculation.ended(request)
        self._departures.end(request, reason)

    def advance(self, result: StepResult, seconds: float = 0.0) -> StepOutputs:
        """As `Scheduler.advance`."""
        step = self.in_flight.popleft()
        if step.step_id != result.step_id:
            raise RuntimeError(f"result of step {result.step_id} came in place of {step.step_id}'s")
        self._cache.commit_step(step.step_id)
        self._adapters.step_done(step.step_id, result.seconds)
        outputs = self.take_arrivals(result) if result.copies or result.adapters else []
        self.total_step_tokens += step.total_tokens
        if result.seconds and step.total_tokens >= PROMPT_SHARE * len(step.rows):
            self._cache.measured_prefill(step.total_tokens, result.seconds)
        if self._speculation is not None:
            num_drafted = sum(map(len, step.drafts.values()))
            only_decodes = step.total_tokens - num_drafted == len(step.rows) and step.samples.all()
            if only_decodes and step.may_draft != step.is_ahead:  # others are between modes
                self._speculation.measured(len(step.rows), seconds, drafts=step.may_draft)
        if self._charges_tokens:
            self._count_service(step, result)
        rows, num_tokens, samples, tokens = step.rows, step.num_tokens, step.samples, result.tokens
        if result.prompt_logprobs:
            self._take_scores(step, result)
        if self._departures.leaving or result.faults or step.drafts:
            is_left = self._set_apart(step, result, outputs)
            tokens = tokens[is_left[samples]]
            rows, num_tokens, samples = rows[is_left], num_tokens[is_left], samples[is_left]
        sampled = rows if len(tokens) == len(rows) else rows[samples]
        self._rows.append(sampled, tokens)
        full = self._rows.commit(rows, num_tokens)
        for request in full or ():
            self._publish(request, step.step_id)
            self._rows.watch(request)
        if result.guesses:
            self._take_guesses(step, result)
        if full is None and not self._is_special(tokens, result):
            return StepOutputs(outputs, self._plain(sampled, tokens))
        return StepOutputs(outputs, self._report(sampled, tokens, result, outputs))

    def _is_special(self, tokens: Int32s, result: StepResult) -> bool:
        """Whether any token may end its request, or carries more data."""
        if result.logprobs or self._rows.scored:
            return True
        stops = self._rows.stops
        return bool(stops) and not stops.keys().isdisjoint(tokens.tolist())

    def _plain(self, rows: Int64s, tokens: Int32s) -> Tokens:
        return Tokens(self._rows.request_ids[rows], tokens, self._rows.num_cached[rows])

    def take_arrivals(self, result: StepResult) -> list[Output]:
        """Copies and loads have ended: requests whose units have all arrived can start. Requests
        whose adapter could not be loaded fail with the reason (W10)."""
        outputs: list[Output] = []
        for loaded in result.adapters:
            outcome = self._adapters.acknowledge(loaded)
            if outcome.error is not None:
                reason = f"the adapter could not be loaded: {outcome.error}"
                waiting = self._admission.waiting.requests_of(outcome.digest)
                waiting += self._slices.paused_requests_of(outcome.digest)
                outputs += [self.finish(r, FinishReason.ERROR, reason) for r in waiting]
        for done in result.copies:
            self._cache.acknowledge(done)
        if result.copies:
            self._admission.copies_ended()
        return outputs

    def _count_service(self, step: Launched, result: StepResult) -> None:
        """Charge one token for each sampled one; earlier tokens were charged when the request
        started."""
        rows, tenancies = step.rows[step.samples].tolist(), step.tenancies[step.samples].tolist()
        for row, tenancy in zip(rows, tenancies, strict=True):
            count = 1 + result.num_accepted.get(row, 0)
            self._admission.waiting.charge(self._departures.member(row, tenancy), count)

    def _take_guesses(self, step: Launched, result: StepResult) -> None:
        """Guesses follow the newest token of rows that run on."""
        live = step.rows[self._rows.is_live(step.rows, step.tenancies)]
        for request in self._rows.requests_at(live):
            assert request.row is not None
            if request.row in result.guesses:
                request.predicted = (request.num_tokens, result.guesses[request.row])

    def _take_scores(self, step: Launched, result: StepResult) -> None:
        for row, tenancy in zip(step.rows.tolist(), step.tenancies.tolist(), strict=True):
            if row in result.prompt_logprobs:
                request = self._departures.member(row, tenancy)
                request.prompt_logprobs.extend(result.prompt_logprobs[row])
                if request.state is State.RUNNING:
                    self._rows.scored.add(row)

    def _set_apart(self, step: Launched, result: StepResult, outputs: list[Output]) -> Bools:
        """Handle rows that do not simply continue: requests that ended or were retracted since the
        step was planned, rows without a result, and rows that checked guesses. Returns, for each
        row, whether it remains to be handled."""
        is_left = self._rows.is_live(step.rows, step.tenancies)
        faults = {fault.row: fault for fault in result.faults}
        if faults:
            is_left &= ~np.isin(step.rows, list(faults))
        if step.drafts:
            is_left &= ~self._rows.are_among(step.rows, list(step.drafts))
        # Lists: with guesses the device idles meanwhile.
        rows, counts, tenancies = (
            column.tolist() for column in (step.rows, step.num_tokens, step.tenancies)
        )
        places = (np.cumsum(step.samples) - 1).tolist()
        for index in (~is_left).nonzero()[0].tolist():
            row, num_tokens = rows[index], counts[index]
            request = self._departures.member(row, tenancies[index])
            token = result.tokens[places[index] : places[index] + 1]
            if row in step.drafts:
                # No plan was made since, so it runs, or it has ended.
                draft, num_right = step.drafts[row], result.num_accepted.get(Row(row), 0)
                token = np.concatenate((draft[:num_right], token))
                num_wrong = len(draft) - num_right
                num_tokens -= num_wrong
                self._rows.computed[row] -= num_wrong
                if request.state is State.RUNNING and row not in faults:
                    outputs.append(self._take_draft(request, num_tokens, token, step, result))
                    continue
            if request.state is State.DRAINING:
                # The step that ran when it ended computed its last token's page. Another step may
                # compute the token itself: a page is usable only with both.
                self._rows.committed[row] += num_tokens
                request.is_broken |= row in faults
                if not request.is_broken:
                    if step.samples[index]:
                        self._rows.hand_over(request)
                        request.extend(token)
                    self._publish(request, step.step_id)
                self._departures.drained(request)
                continue
            if request.row is None:
                self._departures.forget(request, num_tokens)
            else:
                self._rows.committed[row] += num_tokens
                request.is_broken = True
            if request.state is State.FINISHED:
                continue
            if row in faults:
                fault = faults[Row(row)]
                output = self.finish(request, FinishReason.ERROR, fault.reason)
                if fault.is_of_request:
                    field = request.submit.sampling.mask_field
                    output.notice = Notice(error_kind=ErrorKind.REQUEST, error_field=field)
                outputs.append(output)
            elif step.samples[index]:
                request.extend(token)
                logprobs = _logprobs(result, row)
                outputs.append(self._tell(request, token.tolist(), request.num_tokens, logprobs))
            if request.state is State.PAUSED:
                self._publish(request, step.step_id)
        return is_left

    def _take_draft(
        self,
        request: Request,
        num_computed: int,
        tokens: Int32s,
        step: Launched,
        result: StepResult,
    ) -> Output:
        """Guesses of a running request were checked: these tokens follow. All but the last are
        among the `num_computed` that the step computed; results beyond them are freed (P11)."""
        row, lease = request.row, request.lease
        assert row is not None
        assert lease is not None
        assert self._speculation is not None
        num_committed = int(self._rows.committed[row])
        if len(tokens) > len(step.drafts[row]) or not self._cache.has_states:
            num_committed += num_computed  # otherwise the row has the state from before the step
        self._rows.take_draft(request, num_committed, tokens)
        self._cache.accept(lease, request.tokens, num_committed, step.step_id)
        self._rows.watch(request)
        drafts = DraftUse(len(step.drafts[row]), len(tokens) - 1)
        self._speculation.checked(request, drafts.num_draft_tokens, drafts.num_accepted_tokens)
        output = self._tell(request, tokens.tolist(), request.num_tokens, _logprobs(result, row))
        told = output.notice
        output.notice = Notice(drafts=drafts) if told is None else replace(told, drafts=drafts)
        return output

    def _publish(self, request: Request, step_id: StepId) -> None:
        """Publish pages whose tokens were not all known when the step was planned."""
        lease = request.lease
        assert lease is not None
        num_committed = request.num_computed_tokens - request.num_in_flight_tokens
        if request.row is not None:
            num_committed = int(self._rows.committed[request.row])
        self._cache.commit(lease, request.tokens, num_committed, step_id)

    def _report(
        self, rows: Int64s, tokens: Int32s, result: StepResult, outputs: list[Output]
    ) -> Tokens:
        """Outputs of every new token. Most are plain tokens; the others are put into `outputs`."""
        is_plain = self._rows.committed[rows] < self._rows.last[rows]
        stops = self._rows.stops
        if stops and not stops.keys().isdisjoint(tokens.tolist()):
            is_plain &= ~np.isin(tokens, list(stops))
        if result.logprobs or self._rows.scored:
            is_plain &= ~self._rows.are_among(rows, [*result.logprobs, *self._rows.scored])
        special = np.logical_not(is_plain).nonzero()[0]
        if len(special):
            others = rows[special]
            num_committed = self._rows.committed[others].tolist()
            singled = zip(others.tolist(), tokens[special].tolist(), num_committed, strict=True)
            for row, token, num_before in singled:
                request = self._rows.request_at(row)
                logprobs = _logprobs(result, row) if result.logprobs else []
                # The newest token comes after the committed ones.
                output = self._tell(request, [token], num_before + 1, logprobs)
                if result.hidden and row in result.hidden:
                    hidden = tuple(result.hidden[Row(row)].tolist())
                    output.notice = replace(output.notice or Notice(), hidden=hidden)
                outputs.append(output)
            rows, tokens = rows[is_plain], tokens[is_plain]
        return self._plain(rows, tokens)

    def _tell(
        self, request: Request, tokens: list[int], num_tokens: int, logprobs: list[TokenLogprobs]
    ) -> Output:
        """The output of a request's newest tokens; the `num_tokens`-th may be its last."""
        token = tokens[-1]
        reason: FinishReason | None = None
        stop_token: int | None = None
        if token in request.stop_ids and _may_stop(request, num_tokens):
            reason, stop_token = FinishReason.STOP, token
        elif num_tokens >= request.max_num_tokens:
            reason = FinishReason.LENGTH
        num_cached = request.num_cached_tokens or 0
        output = Output(request.submit.request_id, tokens, reason, num_cached, stop_token, logprobs)
        if request.prompt_logprobs and num_tokens == request.num_prompt_tokens + 1:
            output.prompt_logprobs.extend(request.prompt_logprobs)
            request.prompt_logprobs.clear()
        if request.cache_use is not None:
            output.notice = Notice(cache_use=request.cache_use)
            request.cache_use = None
            if request.row is not None:
                self._rows.scored.discard(request.row)
        if reason is not None:
            self._end(request, reason)
        return output

    def fail_in_flight(self, reason: str) -> list[Output]:
        """Launched steps failed, and none is running any more.

        Their requests fail. So do those of later steps, since they may have relied on pages that
        were never filled. Other requests are not affected.
        """
        steps = list(self.in_flight)
        self.in_flight.clear()
        members = [
            self._departures.member(row, tenancy)
            for step in steps
            for row, tenancy in zip(step.rows.tolist(), step.tenancies.tolist(), strict=True)
        ]
        outputs: list[Output] = []
        for request in dict.fromkeys(members):
            if request.row is not None:
                self._rows.computed[request.row] = self._rows.committed[request.row]
            elif request.num_in_flight_tokens:
                self._departures.forget(request, request.num_in_flight_tokens)
            if request.state is State.DRAINING:
                self._departures.drained(request)
            elif request.state is not State.FINISHED:
                outputs.append(self.finish(request, FinishReason.ERROR, reason))
        # Requests that wait for their units may have found pages that were never filled.
        self._admission.start_over()
        for step in steps:
            self._adapters.step_done(step.step_id)
        for step in reversed(steps):
            self._cache.fail_step(step.step_id)
        return outputs


def _may_stop(request: Request, num_tokens: int) -> bool:
    """Whether a stop token may be a request's `num_tokens`-th. A grammar's end is the text's end,
    however early; the sampler allows no other end."""
    sampling = request.submit.sampling
    num_output_tokens = num_tokens - request.num_prompt_tokens
    return num_output_tokens > sampling.min_tokens or sampling.structured_outputs is not None


def _logprobs(result: StepResult, row: int) -> list[TokenLogprobs]:
    """Logprobs of a row's new tokens, if requested."""
    newest = result.logprobs.get(Row(row))
    return [] if newest is None else [*result.draft_logprobs.get(Row(row), ()), newest]
