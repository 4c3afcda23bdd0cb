"""The engine's loop: drain, schedule, launch, advance, emit.

The next step is planned and launched while the current one runs (depth 1), so that the runner never
waits for planning. The directory handles adapters, if there is one. Knows neither HTTP, text nor
tensors; one thread calls it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from manyroots.adapter_names import LoraModule
from manyroots.cache.events import CacheEvent
from manyroots.engine.adapter_directory import MAX_LOAD_TIMES, AdapterDirectory
from manyroots.engine.connectors import Connectors
from manyroots.engine.preparation import Preparation
from manyroots.engine.self_check import SelfCheck
from manyroots.errors import ManyrootsError, UnavailableError
from manyroots.ids import RequestId, Tier
from manyroots.messages import (
    Abort,
    Control,
    ControlKind,
    ControlReply,
    ErrorKind,
    LoadLora,
    LoadTime,
    LoraReply,
    PublishLora,
    SelfCheckStats,
    Stats,
    StepOutputs,
    Submit,
    UnloadLora,
)
from manyroots.observe.steps import StepRing
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import AdapterLoaded, LoadAdapter, LoadId, Plan, Runner, StepResult

if TYPE_CHECKING:  # simulations have no grammars, and need no library for them
    from manyroots.engine.grammar_compiles import GrammarCompiles

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""After this many failures without one good step, the runner counts as dead."""


def _ignore(request_ids: list[RequestId]) -> None:
    """The default of `tell_begun`."""


MAX_WAYS = 4096


class _LoadTimer:
    """Times loads from their launch to their reply: the decide half has no clock."""

    def __init__(self) -> None:
        self._begun: dict[LoadId, tuple[LoadAdapter, float]] = {}
        self._ended: deque[LoadTime] = deque(maxlen=MAX_LOAD_TIMES)

    def launch(self, plan: Plan) -> None:
        for intent in plan.adapters:
            if isinstance(intent, LoadAdapter):
                self._begun[intent.load_id] = (intent, time.monotonic())

    def answer(self, answers: tuple[AdapterLoaded, ...]) -> None:
        for answer in answers:
            load, begin = self._begun.pop(answer.load_id)
            seconds = time.monotonic() - begin
            target = Tier.HOST if load.target is None else Tier.DEVICE
            is_good, digest = answer.error is None, load.digest.hex()
            self._ended.append(LoadTime(load.source, target, seconds, is_good, digest))

    def take(self) -> list[LoadTime]:
        ended = list(self._ended)
        self._ended.clear()
        return ended


TakeWeights = Callable[[str], bytes]
"""Fills the model from a folder; returns the identity of the new weights. Raises ManyrootsError if
nothing was changed, and UnavailableError if it failed halfway."""


def _no_wake() -> None:
    """The default of `Alarm.wake`: no thread sleeps yet."""


class Alarm:
    """The reason that the engine cannot continue, raised outside of a step. Any thread may ring it,
    once; the loop's thread reads it and is woken for that."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.wake: Callable[[], None] = _no_wake

    def ring(self, reason: str) -> None:
        self.reason = reason
        self.wake()


class EventSink(Protocol):
    """Receives events of the cache."""

    def publish(self, events: Sequence[CacheEvent]) -> None: ...
    def close(self) -> None: ...


class EngineLoop:
    """Drives one scheduler and one runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        directory: AdapterDirectory | None = None,
        compiles: GrammarCompiles | None = None,
        alarm: Alarm | None = None,
        events: EventSink | None = None,
        connectors: Connectors | None = None,
        make_check: Callable[[Callable[[Submit], None]], SelfCheck] | None = None,
        take_weights: TakeWeights | None = None,
        depth: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now`: the clock for kept prefixes and for step times, in seconds. `take_weights`: None
        if weights cannot be updated in place. `directory`: None if the caller registers adapters
        with the scheduler. `compiles`: None refuses structured output. `alarm`: None if the runner
        cannot fail outside of a step. `events`: receives the pages that were added or removed in
        each step. `connectors`: hear of those, of plans and of results, in order. `make_check`:
        takes the submit function; None checks nothing."""
        self._scheduler = scheduler
        self._runner = runner
        self.preparation = Preparation(scheduler, directory, compiles)
        """Requests that the scheduler does not have yet."""
        self._alarm = alarm
        self._events = events
        self._connectors = connectors
        self._unpublished: list[CacheEvent] = []
        """Events that connectors have heard in this step."""
        self._check = None if make_check is None else make_check(self.preparation.submit)
        self._depth = depth
        self._now = now
        self._launched: deque[Future[StepResult]] = deque()
        self._planned_at_s: deque[float] = deque()
        """The time at which each of these was planned."""
        self._done_at_s = 0.0
        """The time of the newest result."""
        self._gathered = StepOutputs([])
        self._failures_in_a_row = 0
        self._load_timer = _LoadTimer()
        self._first_runs: Counter[str] = Counter(kernel=0, graph=0)
        """Kernels and graphs that steps had to wait for, by kind."""
        self.ways: dict[str, dict[str, float]] = {}
        """Load times of adapters, by digest and route; only for display."""
        self._take_weights = take_weights
        self._controls: list[ControlReply] = []
        self._asked: deque[Control] = deque()
        """Controls that wait until no step runs."""
        self._is_paused = False
        self.ring: StepRing | None = None
        """Records each step; None if no page will ask."""
        self.tell_begun: Callable[[list[RequestId]], None] = _ignore
        """Receives the requests that start to compute, before their step: if the step kills the
        process, they are known."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do now. Reads in progress do not count."""
        if len(self._gathered) > 0 or self._controls or self._asked:
            return True
        if self._launched or (self._scheduler.has_work and not self._is_paused):
            return True
        if self._alarm is not None and self._alarm.reason is not None:
            return True
        return self.preparation.has_outcomes

    @property
    def is_paused(self) -> bool:
        """Whether no step starts until the engine is resumed."""
        return self._is_paused

    @property
    def is_reading(self) -> bool:
        """Whether an adapter's files are being read, or a grammar is being compiled."""
        return self.preparation.is_reading

    def wait_for_read(self, timeout_s: float | None = None) -> None:
        """Sleep until a read ends or until the timeout; only while `is_reading`."""
        self.preparation.wait(timeout_s)

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on another thread, whenever a read or the engine ends."""
        if self._alarm is not None:
            self._alarm.wake = wake
        self.preparation.wake_by(wake)

    def note_adapter(self, module: LoraModule) -> None:
        """Register an adapter's name; its files are read on first use."""
        self.preparation.note(module)

    def handle(
        self, message: Submit | Abort | LoadLora | PublishLora | UnloadLora | Control
    ) -> None:
        """Take one message from a client."""
        match message:
            case Control():
                self._is_paused |= message.kind is ControlKind.PAUSE
                self._asked.append(message)
            case Submit():
                if self._check is not None:
                    self._check.note(message)
                self.preparation.submit(message)
            case Abort():
                for request_id in message.request_ids:
                    self._abort(request_id)
            case _:
                self.preparation.handle(message)

    def _abort(self, request_id: RequestId) -> None:
        if self._check is not None:
            self._check.forget(request_id)
        if not self.preparation.abort(request_id):
            output = self._scheduler.abort(request_id)
            if output is not None:
                self._gathered.outputs.append(output)

    def step(self) -> StepOutputs:
        """Launch the next step, wait for the one before it, and give the outputs so far.

        Raises UnavailableError if there will be no further step.
        """
        if self._alarm is not None and self._alarm.reason is not None:
            raise UnavailableError(self._alarm.reason)
        if self.preparation.has_outcomes:
            self._gathered.outputs.extend(self.preparation.poll())
        self._scheduler.pass_time(self._now())
        if self._launched and self._scheduler.awaits_result:
            # Its messages are sent while the next step runs.
            self._finish_oldest()
        began_s = self._now()
        plan = None if self._is_paused or self._asked else self._scheduler.schedule()
        if plan is not None:
            if self._connectors is not None:
                self._tell_connectors(plan)
            self._planned_at_s.append(began_s)
            self._load_timer.launch(plan)
            if plan.arrivals:
                self.tell_begun([a.request_id for a in plan.arrivals if a.request_id > 0])
            self._launched.append(self._runner.launch(plan))
            if self.ring is not None:
                self.ring.launched(plan)
        if len(self._launched) > self._depth or (plan is None and self._launched):
            self._finish_oldest()
        if not self._launched:
            while self._asked:
                self._controls.append(self._carried_out(self._asked.popleft()))
        if self._connectors is not None:
            self._tell_connectors(None)
        if self._events is not None:
            events, self._unpublished = self._unpublished + self._scheduler.take_events(), []
            self._events.publish(events)
        outputs, self._gathered = self._gathered, StepOutputs([])
        self.preparation.pass_on(outputs)
        if self._check is not None:
            self._check.take(outputs)
        return outputs

    def _tell_connectors(self, what: Plan | StepResult | None) -> None:
        """What the cache did, and then this."""
        assert self._connectors is not None
        events = self._scheduler.take_events()
        if self._events is not None:
            self._unpublished += events
        self._connectors.hear(events, what)

    def _carried_out(self, control: Control) -> ControlReply:
        """Execute a control; no step runs now."""
        match control.kind:
            case ControlKind.PAUSE:
                self._is_paused = True  # again: a resume may have come before it
            case ControlKind.RESUME:
                self._is_paused = False
            case ControlKind.RESET_CACHE:
                return ControlReply(control.op_id, num_pages=self._scheduler.reset_cache())
            case ControlKind.UPDATE_WEIGHTS:
                return self._update_weights(control)
        return ControlReply(control.op_id)

    def _update_weights(self, control: Control) -> ControlReply:
        def refused(why: str) -> ControlReply:
            return ControlReply(control.op_id, error=why, error_kind=ErrorKind.REQUEST)

        if self._take_weights is None:
            return refused(
                "weights can't be updated in place with several ranks, or with --quantization."
            )
        if not self._is_paused:
            return refused("the engine is not paused; pause it first.")
        if self._check is not None:
            # No request waits for them, and they hold pages.
            for request_id in self._check.give_up():
                self._abort(request_id)
        if num_begun := self._scheduler.num_begun:
            return refused(
                f"{num_begun} requests have begun with the old weights; pause with mode wait "
                "or abort first."
            )
        try:
            identity = self._take_weights(control.path)
        except UnavailableError:
            raise  # the model is neither the old nor the new one
        except ManyrootsError as error:
            return refused(str(error))
        return ControlReply(control.op_id, num_pages=self._scheduler.change_weights(identity))

    def take_controls(self) -> list[ControlReply]:
        """Replies to controls since the last call."""
        controls, self._controls = self._controls, []
        return controls

    def take_replies(self) -> list[LoraReply]:
        """Replies to loads and unloads since the last call. A read that ended during a step is told
        now, not after the next step."""
        if self.preparation.has_outcomes:
            self._gathered.outputs.extend(self.preparation.poll())
        return self.preparation.take_replies()

    def take_loads(self) -> list[LoadTime]:
        """Adapters that were read or loaded since the last call."""
        loads = self.preparation.take_read_times() + self._load_timer.take()
        for load in loads:
            if load.is_good:
                self._note_way(load)
        return loads

    def _note_way(self, load: LoadTime) -> None:
        """Record how long an adapter's last load to a tier took, for the last few thousand."""
        ways = self.ways.pop(load.digest, {})
        ways[f"{load.source.value} to {load.target.value}"] = load.seconds
        self.ways[load.digest] = ways
        if len(self.ways) > MAX_WAYS:
            del self.ways[next(iter(self.ways))]

    def stats(self) -> Stats:
        stats = replace(self._scheduler.stats(), first_runs=dict(self._first_runs))
        if self._connectors is not None:
            dropped, failed = self._connectors.dropped, self._connectors.failed
            stats = replace(stats, connector_drops=dropped, connector_failures=failed)
        check = self._check
        if check is None:
            return stats
        checks = SelfCheckStats(check.total_checks, check.total_differences)
        return replace(stats, self_check=checks)

    def close(self) -> None:
        self.preparation.close()
        self._runner.close()
        if self._events is not None:
            self._events.close()
        if self._connectors is not None:
            self._connectors.close()

    def _finish_oldest(self) -> None:
        try:
            result = self._launched.popleft().result()
        except Exception as error:
            self._recover(error)
            return
        self._failures_in_a_row = 0
        if self.ring is not None:
            self.ring.done(result)
        if self._connectors is not None:
            self._tell_connectors(result)
        self._load_timer.answer(result.adapters)
        for run in result.first_runs:
            self._first_runs[run.kind] += 1
            logger.info("step %d: %s %s was made for it", result.step_id, run.kind, run.name)
        began_s, self._done_at_s = max(self._planned_at_s.popleft(), self._done_at_s), self._now()
        made = self._scheduler.advance(result, self._done_at_s - began_s)
        self._gathered.outputs.extend(made.outputs)
        self._gathered.tokens = made.tokens  # one result a step: no tokens are there yet

    def _recover(self, error: Exception) -> None:
        """A step failed: fail its requests and those that may depend on it, then continue."""
        logger.exception("step failed", exc_info=error)
        for future in self._launched:
            if future.exception() is None:  # waits
                # Its tokens depend on the failed step; the copies that ended with it do not.
                self._load_timer.answer(future.result().adapters)
                self._gathered.outputs.extend(self._scheduler.take_arrivals(future.result()))
        self._launched.clear()
        self._planned_at_s.clear()
        reason = f"the step that computed this request failed: {error}"
        self._gathered.outputs.extend(self._scheduler.fail_in_flight(reason))
        if isinstance(error, UnavailableError):
            raise error
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise UnavailableError(
                f"{self._failures_in_a_row} steps in a row failed, the last with: {error}"
            ) from error
