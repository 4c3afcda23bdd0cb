"""Our scheduler and cache in the hands of the benches: the one place that knows how they are
built and called. No model and no fake runner, whose checks would be measured too.
"""

from __future__ import annotations

from array import array

import numpy as np

from manyroots.bench.scheduler_trace import MADE_UP_TOKEN, SchedulerLimits, StepTimes, clock
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.config import SchedulerSettings
from manyroots.ids import Namespace, RequestId, StepId
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import Int32s, Plan, StepResult

BASE = Namespace(adapter=None, salt=None)
KEY = PrefixKey(BASE)
CACHE_KINDS = ("plain", "hash chains")
"""What `bench cache` measures: the cache as built for each of these."""


def make_cache(num_pages: int, page_size: int, kind: str = "plain") -> PrefixCache:
    assert kind in CACHE_KINDS
    layout = CacheLayout.of(page_size, (Capacity(FULL_ATTENTION, num_pages),))
    return PrefixCache(layout, CachePolicies(records_events=kind == "hash chains"))


class CacheDriver:
    """A request's way through the cache's facade, step by step."""

    def __init__(self, num_pages: int, page_size: int, kind: str) -> None:
        self._cache = make_cache(num_pages, page_size, kind)
        self._step = 0

    def match(self, tokens: Int32s) -> int:
        """How many tokens would be reused; changes nothing."""
        return self._cache.lookup(KEY, tokens).num_pages * self._cache.page_size

    def begin(self, tokens: Int32s) -> Lease:
        """Match, hold what was found, allocate the rest, evicting as needed."""
        lease = self._cache.claim(KEY, tokens, len(tokens), may_reuse=True)
        extension = self._cache.extend(
            lease, lease.num_cached_tokens, len(tokens), StepId(self._step + 1)
        )
        if isinstance(extension, Refusal):
            raise RuntimeError("the pool is smaller than one request")
        return lease

    def insert(self, lease: Lease, tokens: Int32s) -> None:
        """Publish every full page, as a step that computes the whole prompt does."""
        self._step += 1
        step_id = StepId(self._step)
        self._cache.announce(lease, tokens, len(tokens), step_id)
        self._cache.commit_step(step_id)
        self._cache.take_events()

    def free(self, lease: Lease) -> None:
        self._cache.release(lease, Ending.FINISHED)

    @property
    def num_cached_pages(self) -> int:
        return self._cache.stats().planes[0].num_cached


class SchedulerDriver:
    """`DrivenScheduler` of this repository."""

    def __init__(self, limits: SchedulerLimits) -> None:
        settings = SchedulerSettings(
            max_num_seqs=limits.batch, max_num_batched_tokens=limits.budget
        )
        cache = make_cache(limits.num_pages, limits.page_size)
        adapters = Residency(AdapterLimits(max_loras=0, max_cpu_loras=0))
        self._scheduler = Scheduler(settings, cache, adapters, max_model_len=limits.max_model_len)
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, prompts: list[list[int]], output_len: int) -> float:
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0)
        first = self._num_submitted
        submissions = [
            # As the wire hands it over; a list would be converted in the engine's time.
            Submit(RequestId(first + i), array("i", prompt), None, sampling, i, (), adapter=None)
            for i, prompt in enumerate(prompts)
        ]
        self._num_submitted += len(prompts)
        begin = clock()
        for submission in submissions:
            self._scheduler.submit(submission)
        return clock() - begin

    def step(self) -> StepTimes:
        begin = clock()
        plan = self._scheduler.schedule()
        planned = clock()
        if plan is None:
            return StepTimes(planned - begin, 0.0, 0, 0, has_prefill=False, num_hit_tokens=0)
        result = _answer(plan)
        answered = clock()
        self._scheduler.advance(result)
        done = clock()
        return StepTimes(
            plan_s=planned - begin,
            advance_s=done - answered,
            num_rows=len(plan.rows),
            num_arrivals=len(plan.arrivals),
            has_prefill=bool(plan.arrivals) or int(plan.num_tokens.max()) > 1,
            num_hit_tokens=sum(arrival.num_computed_tokens for arrival in plan.arrivals),
        )


def _answer(plan: Plan) -> StepResult:
    num_samples = int(np.count_nonzero(plan.samples))
    return StepResult(plan.step_id, np.full(num_samples, MADE_UP_TOKEN, np.int32))
