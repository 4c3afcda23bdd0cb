"""A small engine without a model, audited as it steps; shared by tests of the decide half."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.config import SchedulerSettings
from manyroots.engine.loop import EngineLoop
from manyroots.ids import AdapterName, AdapterSlot, Namespace, RequestId
from manyroots.lora.audit import audit as audit_adapters
from manyroots.lora.limits import AdapterLimits, DeviceBlocks
from manyroots.lora.residency import Residency
from manyroots.messages import Output, Submit
from manyroots.runner.fake import FakeRunner, fake_next_token
from manyroots.sampling import SamplingParams
from manyroots.scheduler.audit import audit as audit_scheduler
from manyroots.scheduler.scheduler import Scheduler
from manyroots.scheduler.speculation import DraftSource
from manyroots.step import AdapterLoaded, Copy, LoadAdapter, Plan, StepResult
from tests.helpers.audits import CacheAudits

BASE = Namespace(adapter=None, salt=None)
VOCAB = 50


def submit(
    number: int,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop_ids: tuple[int, ...] = (),
    salt: str | None = None,
    adapter: str | None = None,
    priority: int = 0,
) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, temperature=0)
    name = None if adapter is None else AdapterName(adapter)
    return Submit(RequestId(number), prompt, salt, sampling, number, stop_ids, name, priority)


def expected_tokens(
    request: Submit, digest: bytes | None = None, weights_from: int = 0
) -> list[int]:
    """What the request gives alone, with these weights, without any cache, scheduler or batch."""
    history = list(request.prompt)
    output: list[int] = []
    assert request.sampling.max_tokens is not None
    while len(output) < request.sampling.max_tokens:
        token = fake_next_token(history, VOCAB, digest, weights_from)
        if token in request.stop_ids and len(output) < request.sampling.min_tokens:
            token = (token + 1) % VOCAB
        output.append(token)
        history.append(token)
        if token in request.stop_ids and len(output) > request.sampling.min_tokens:
            break
    return output


class _Launched(Future[StepResult]):
    """A step that runs until its result is asked for, and the adapter slots that it reads."""

    def __init__(self, future: Future[StepResult], slots: set[AdapterSlot]) -> None:
        super().__init__()
        self._future = future
        self.slots = slots

    def result(self, timeout: float | None = None) -> StepResult:
        self.slots = set()
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.slots = set()
        return self._future.exception(timeout)


class _Watched:
    """A runner that checks every plan against the step's limits before passing it on, and that no
    adapter is loaded into a slot that a launched step reads: the fake runner computes a step when
    it is launched, and could not see that (W09)."""

    def __init__(self, runner: FakeRunner, settings: SchedulerSettings) -> None:
        self._runner = runner
        self._settings = settings
        self._slot_of: dict[int, AdapterSlot | None] = {}
        """By row."""
        self._launched: list[_Launched] = []

    def launch(self, plan: Plan) -> Future[StepResult]:
        assert plan.total_tokens <= self._settings.max_num_batched_tokens
        assert len(set(plan.rows.tolist())) == len(plan.rows) <= self._settings.max_num_seqs
        assert (plan.num_tokens > 0).all()
        has_intents = plan.copies or plan.keeps or plan.adapters
        assert len(plan.rows) or has_intents or plan.waits, "an empty plan"
        self._launched = [step for step in self._launched if step.slots]
        read = {slot for step in self._launched for slot in step.slots}
        changed = {intent.target.slot for intent in plan.adapters if intent.target is not None}
        assert not changed & read, f"slots {changed & read} are changed under a launched step"
        self._slot_of |= {int(arrival.row): arrival.adapter_slot for arrival in plan.arrivals}
        slots = {slot for row in plan.rows.tolist() if (slot := self._slot_of.get(row)) is not None}
        self._launched.append(_Launched(self._runner.launch(plan), slots))
        return self._launched[-1]

    def close(self) -> None:
        self._runner.close()


class SchedulerHarness:
    """Scheduler, cache and fake runner wired as in the engine."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 32,
        chunk: int | None = None,
        depth: int = 1,
        reuse: bool = True,
        capacities: tuple[Capacity, ...] | None = None,
        policies: CachePolicies | None = None,
        finish_copies: Callable[[list[Copy]], list[tuple[Copy, bool]]] | None = None,
        max_model_len: int | None = None,
        max_loras: int = 0,
        max_cpu_loras: int = 0,
        num_spare_slots: int = 0,
        blocks: DeviceBlocks | None = None,
        policy: str = "fcfs",
        adapter_quantum_steps: int | None = None,
        finish_loads: Callable[[list[LoadAdapter]], list[AdapterLoaded]] | None = None,
        speculative_config: str | None = None,
        draft_source: DraftSource | None = None,
    ) -> None:
        settings = SchedulerSettings(
            speculative_config=speculative_config,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=chunk,
            scheduling_policy=policy,
            adapter_quantum_steps=adapter_quantum_steps,
        )
        capacities = capacities or (Capacity(FULL_ATTENTION, num_pages),)
        layout = CacheLayout.of(page_size, capacities)
        self.cache = PrefixCache(layout, policies or CachePolicies(reuse=reuse))
        self.runner = FakeRunner(
            page_size=page_size,
            vocab_size=VOCAB,
            families=tuple(capacity.family for capacity in capacities),
            finish_copies=finish_copies,
            finish_loads=finish_loads,
            is_held=self.cache.is_held,
        )
        longest = max_model_len or num_pages * page_size
        limits = AdapterLimits(
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            num_spare_slots=num_spare_slots,
            blocks=blocks,
        )
        self.adapters = Residency(limits)
        self.scheduler = Scheduler(
            settings,
            self.cache,
            self.adapters,
            max_model_len=longest,
            draft_source=draft_source,
        )
        self.loop = EngineLoop(self.scheduler, _Watched(self.runner, settings), depth=depth)
        self.outputs: dict[int, list[Output]] = {}
        self._audits = CacheAudits(self.cache)

    def step(self) -> None:
        for output in self.loop.step():
            self.outputs.setdefault(int(output.request_id), []).append(output)
        self._audits.after_step(is_last=not self.loop.has_work)
        audit_adapters(self.adapters)
        audit_scheduler(self.scheduler.slices, self.scheduler.fetches)

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.loop.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.outputs[number] for token in output.tokens]

    def last(self, number: int) -> Output:
        return self.outputs[number][-1]
