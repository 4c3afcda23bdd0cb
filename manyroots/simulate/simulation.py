"""Runs a trace through the real scheduler and cache, on virtual time.

In: a trace, settings, a cost model, faults and a seed. Out: a record of every sequence and counts
of the run, the same for the same input, whatever the machine and its load. The engine's own loop
drives it, planning one step ahead. With `audit`, every page read is checked and every
invariant is audited after every round; what fails names the seed.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manyroots.engine.loop import EventSink
from manyroots.errors import ManyrootsError
from manyroots.ids import RequestId, Tier
from manyroots.messages import Abort, FinishReason, Output, StepOutputs, StorageStats
from manyroots.simulate.adapters import TraceAdapters
from manyroots.simulate.clock import Clock
from manyroots.simulate.costs import CostModel
from manyroots.simulate.drafts import TraceDrafts
from manyroots.simulate.engine import build_engine
from manyroots.simulate.executors import CheckedExecutor, SimulatedExecutor, UncheckedExecutor
from manyroots.simulate.faults import NO_FAULTS, Faults, FaultSource
from manyroots.simulate.prefixes import SeenPrefixes
from manyroots.simulate.records import Record, SimulationError
from manyroots.simulate.runner import ModelledRunner
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.trace import Trace
from manyroots.simulate.traffic import TraceSequence, sequences
from manyroots.simulate.transfers import TransferModel

MAX_IDLE_ROUNDS = 3
"""Rounds in a row with work to do, nothing launched and no time passed: it would never end."""
MAX_SILENT_ROUNDS = 5000
"""Rounds in a row without a token or an ending, however much was computed: requests would take
each other's place for ever. The longest prompt is a few hundred steps."""


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """What a simulation gave."""

    settings: SimulationSettings
    records: list[Record]
    duration_s: float
    """From the beginning of the trace until the last sequence ended."""
    busy_s: float
    num_steps: int
    num_failed_steps: int
    num_audits: int
    num_retractions: int
    num_pauses: int
    """Requests put to rest for those of another adapter, each as often as it was."""
    peak_held_pages: int
    num_hit_tokens: int
    """Tokens reused when requests first began."""
    num_host_hit_tokens: int
    """Of those, what was loaded back from the host."""
    num_copied_pages: dict[str, int]
    """Between tiers, by "source to target"."""
    num_bad_copies: int
    storage: StorageStats | None
    num_adapter_loads: dict[str, int]
    """By where the adapter was found."""
    num_bad_loads: int
    num_adapter_reloads: int
    num_lent_pages: int
    """Pages whose memory went to adapters, each as often as it did; 0 without one memory."""
    num_returned_pages: int
    num_draft_tokens: int
    """Guessed and checked."""
    num_accepted_tokens: int
    plan_digest: str
    """Equal where two runs made the same plans in the same order; empty without
    `digests_plans`."""


def simulate(
    trace: Trace,
    settings: SimulationSettings,
    costs: CostModel,
    *,
    seed: int,
    faults: Faults = NO_FAULTS,
    audit: bool = False,
    whole_audit_every: int = 1,
    digests_plans: bool = True,
) -> SimulationRun:
    """Run a trace to its end. `whole_audit_every`: see `QuickAudit`."""
    simulation = EngineSimulation(
        trace,
        settings.with_pages(costs),
        costs,
        seed,
        faults,
        audit,
        whole_audit_every=whole_audit_every,
        digests_plans=digests_plans,
    )
    try:
        with quiet_loop():
            simulation.receive_trace(trace)
            simulation.advance_to(math.inf)
            return simulation.finish()
    except ManyrootsError:
        raise
    except Exception as error:
        raise SimulationError(f"seed {seed}, round {simulation.round}: {error}") from error


class EngineSimulation:
    """One engine under way. It is given sequences in the order of their arrival."""

    def __init__(
        self,
        trace: Trace,
        settings: SimulationSettings,
        costs: CostModel,
        seed: int,
        faults: Faults,
        audit: bool,
        events: EventSink | None = None,
        *,
        whole_audit_every: int = 1,
        digests_plans: bool = True,
    ) -> None:
        """`trace`: whose adapters it has."""
        self.settings = settings
        self.audits = audit
        self.seen = SeenPrefixes(settings.block_size) if audit else None
        self.round = 0
        self.clock = Clock()
        self.faults = FaultSource(faults, seed)
        self.replies: dict[RequestId, list[int]] = {}
        self.records: dict[RequestId, Record] = {}
        self.coming: deque[tuple[float, TraceSequence]] = deque()
        """Every sequence it was given, with the time it comes at."""
        self.aborts: list[tuple[int, RequestId]] = []
        """A heap of (round, request that leaves then)."""
        self.reloads: list[tuple[int, int, RequestId, str]] = []
        """A heap of (round, 0 to unload or 1 to load again, whose fault it is, adapter)."""
        self.transfers = TransferModel(costs, self.faults, page_size=settings.block_size)
        self.runner = ModelledRunner(
            self.clock,
            costs,
            self._executor(),
            self.faults,
            self.transfers,
            max_num_seqs=settings.max_num_seqs,
            speculates=settings.num_speculative_tokens > 0,
            digests_plans=digests_plans,
        )
        page_bytes = int(costs.kv_bytes_per_token * settings.block_size)
        drafts = None
        if settings.num_speculative_tokens:
            drafts = TraceDrafts(self.replies, settings.acceptance, seed)
        self.engine = build_engine(
            settings,
            self.runner,
            self.clock,
            page_bytes,
            events,
            drafts,
            whole_audit_every=whole_audit_every,
        )
        self.adapters = TraceAdapters(self.engine.scheduler, costs, trace)
        self.on_output: Callable[[Output, Record], None] = lambda output, record: None
        """Told of each output after it is recorded."""
        self.num_audits = 0
        self.peak_held_pages = 0
        self.idle_rounds = 0
        self.silent_rounds = 0

    def receive_trace(self, trace: Trace) -> None:
        """Give it all of a trace."""
        arrivals: list[tuple[float, TraceSequence]] = []
        for sequence in sequences(trace):
            arrival_s = sequence.line.arrival_s
            if arrivals and self.faults.joins_previous(sequence.request_id):
                arrival_s = arrivals[-1][0]
            arrivals.append((arrival_s, sequence))
        for arrival_s, sequence in sorted(arrivals, key=lambda arrival: arrival[0]):
            self.receive(arrival_s, sequence)

    def receive(self, arrival_s: float, sequence: TraceSequence) -> None:
        """Give it a sequence, which arrives no earlier than those before it."""
        self.settings.check_fits(sequence)
        self.coming.append((arrival_s, sequence))

    def advance_to(self, moment_s: float) -> None:
        """Run until a moment, or until all that it was given has ended."""
        while self.coming or self.engine.scheduler.is_serving:
            if self.clock.now_s >= moment_s:
                return
            if not self.engine.loop.has_work:
                if self.coming[0][0] >= moment_s:
                    return
                self.clock.wait_until(self.coming[0][0])
            self._receive()
            self._round(moment_s)

    def finish(self) -> SimulationRun:
        """Check the end, and give what came of it."""
        duration_s = self.clock.now_s
        self._drain()
        self._check_end()
        stats = self.engine.loop.stats()
        speculation = stats.speculation
        loads, memory = self.engine.adapters.transfers.total_loads, self.engine.memory
        return SimulationRun(
            settings=self.settings,
            records=list(self.records.values()),
            duration_s=duration_s,
            busy_s=self.runner.busy_s,
            num_steps=self.runner.num_steps,
            num_failed_steps=self.runner.num_failed_steps,
            num_audits=self.num_audits,
            num_retractions=stats.total_retractions,
            num_pauses=stats.total_pauses,
            peak_held_pages=self.peak_held_pages,
            num_hit_tokens=stats.total_hit_tokens,
            num_host_hit_tokens=self.engine.cache.stats().total_host_hit_tokens,
            num_copied_pages={
                f"{source.value} to {target.value}": count
                for (source, target), count in self.transfers.num_copied_units.items()
            },
            num_bad_copies=self.transfers.num_bad_copies,
            storage=stats.storage,
            num_adapter_loads={tier.value: loads[tier] for tier in (Tier.HOST, Tier.STORAGE)},
            num_bad_loads=self.transfers.num_bad_loads,
            num_adapter_reloads=self.adapters.num_reloads,
            num_lent_pages=0 if memory is None else memory.total_lent_units,
            num_returned_pages=0 if memory is None else memory.total_returned_units,
            num_draft_tokens=0 if speculation is None else speculation.total_draft_tokens,
            num_accepted_tokens=0 if speculation is None else speculation.total_accepted_tokens,
            plan_digest="" if self.runner.digest is None else self.runner.digest.hexdigest(),
        )

    def _executor(self) -> SimulatedExecutor:
        if not self.audits:
            return UncheckedExecutor(self.replies, self.transfers)
        return CheckedExecutor(
            self.replies,
            self.transfers,
            page_size=self.settings.block_size,
            families=tuple(capacity.family for capacity in self.settings.capacities()),
            is_held=lambda family, unit: self.engine.cache.is_held(family, unit),
        )

    def _receive(self) -> None:
        """Hand the engine what has arrived by now."""
        while self.coming and self.coming[0][0] <= self.clock.now_s:
            arrival_s, sequence = self.coming.popleft()
            self._submit(arrival_s, sequence)
        while self.aborts and self.aborts[0][0] <= self.round:
            _, request_id = heapq.heappop(self.aborts)
            self.engine.loop.handle(Abort([request_id]))
        while self.reloads and self.reloads[0][0] <= self.round:
            _, is_load, request_id, name = heapq.heappop(self.reloads)
            if is_load:
                self.adapters.reload(name, content=self.faults.new_content(request_id))
            else:
                self.adapters.unload(name)

    def _submit(self, arrival_s: float, sequence: TraceSequence) -> None:
        line, request_id = sequence.line, sequence.request_id
        reply = sequence.reply_tokens()
        self.replies[request_id] = reply
        is_served = self.adapters.is_loaded(line.adapter)
        namespace = self.adapters.namespace(line) if is_served else None
        self.records[request_id] = Record(sequence, arrival_s, reply, namespace)
        submit = sequence.to_submit()
        if self.seen is not None and namespace is not None:
            self.seen.add(namespace, [*submit.prompt, *reply])
        self.engine.loop.handle(submit)
        abort_after = self.faults.abort_after(sequence)
        if abort_after is not None:
            heapq.heappush(self.aborts, (self.round + abort_after, request_id))
        reload_after = None if line.adapter is None else self.faults.reload_after(sequence)
        if line.adapter is not None and reload_after is not None:
            after, pause = reload_after
            if pause:
                heapq.heappush(self.reloads, (self.round + after, 0, request_id, line.adapter))
            begin = self.round + after + pause
            heapq.heappush(self.reloads, (begin, 1, request_id, line.adapter))

    def _drain(self) -> None:
        """All have ended; copies that no request waits for may still be under way."""
        while self.engine.loop.has_work:
            self._round()

    def _round(self, until_s: float = math.inf) -> None:
        """One turn of the loop: a step launched, one finished, or both."""
        before = (self.runner.num_steps, self.clock.now_s)
        next_s = self.coming[0][0] if self.coming else math.inf
        self.runner.wait_at_most_until_s = min(next_s, until_s)
        outputs = self.engine.loop.step()
        self.round += 1
        self._note(outputs)
        num_held_pages = self.engine.cache.index.pools[0].num_held
        self.peak_held_pages = max(self.peak_held_pages, num_held_pages)
        if self.audits:
            self.engine.audit()
            self.num_audits += 1
        is_idle = not len(outputs) and before == (self.runner.num_steps, self.clock.now_s)
        self.idle_rounds = self.idle_rounds + 1 if is_idle else 0
        self.silent_rounds = 0 if len(outputs) else self.silent_rounds + 1
        is_stuck = self.idle_rounds >= MAX_IDLE_ROUNDS or self.silent_rounds >= MAX_SILENT_ROUNDS
        if is_stuck and self.engine.loop.has_work:
            raise SimulationError(f"stuck at {self.clock.now_s} s: {self.engine.loop.stats()}")

    def _note(self, outputs: StepOutputs) -> None:
        for output in outputs:
            record = self.records[output.request_id]
            if not record.has_begun:
                self._check_reuse(record, output)
            record.note(output, self.clock.now_s)
            self.on_output(output, record)
            if output.finish_reason is FinishReason.ERROR and not self._is_expected(record, output):
                raise SimulationError(f"request {output.request_id} failed: {output.error}")

    def _is_expected(self, record: Record, output: Output) -> bool:
        """Whether a request that failed did so for a fault that was made."""
        error = output.error or ""
        if record.namespace is None:
            return "does not exist" in error
        if "could not be loaded" in error:
            return self.transfers.num_bad_loads > 0
        return "was made to fail" in error and self.runner.num_failed_steps > 0

    def _check_reuse(self, record: Record, output: Output) -> None:
        """Whatever was reused, another request of the same namespace must have asked for."""
        if self.seen is None or record.namespace is None:
            return
        prompt = record.sequence.line.prompt_tokens().tolist()
        most = self.seen.match(record.namespace, prompt, times=2)  # itself and another
        if output.num_cached_tokens > most:
            raise SimulationError(
                f"request {output.request_id} reused {output.num_cached_tokens} tokens, and its "
                f"namespace {record.namespace} has seen {most} of them"
            )

    def _check_end(self) -> None:
        """All have ended, and nothing is held."""
        for request_id, record in self.records.items():
            if record.finish_reason is None:
                raise SimulationError(f"request {request_id} never ended")
        stats = self.engine.loop.stats()
        if stats.num_held_pages or stats.num_running or stats.num_waiting:
            raise SimulationError(f"all requests have ended, and yet: {stats}")
        for plane in self.engine.cache.stats().planes:
            if plane.num_held:
                raise SimulationError(f"all requests have ended, and yet: {plane}")


@contextmanager
def quiet_loop() -> Iterator[None]:
    """Steps made to fail are no news: the loop's log of them is left out meanwhile."""
    logger = logging.getLogger("manyroots.engine.loop")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
