"""A runner on virtual time: the seam of `step.py` over a cost model.

Takes plans, gives futures that are done when the modelled device would be. Steps run one after
the other: one launched while another runs begins when that one ends, as on a real device. Copies
and loads run beside them (`transfers.py`), from the begin of the step that brings them along.

A fault of the plan's own making (a wrong page) is raised out of `launch`, where no loop would take
it for a failed step and go on; a failed step asked for by the fault source is in its future.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace

from manyroots.simulate.clock import Clock, TimedFuture
from manyroots.simulate.costs import CostModel, StepLoad
from manyroots.simulate.executors import SimulatedExecutor
from manyroots.simulate.faults import FaultSource
from manyroots.simulate.plan_digest import PlanDigest
from manyroots.simulate.records import SimulationError
from manyroots.simulate.transfers import TransferModel
from manyroots.step import Plan, StepResult


class ModelledRunner:
    """Implements `Runner`. One thread calls it."""

    def __init__(
        self,
        clock: Clock,
        costs: CostModel,
        executor: SimulatedExecutor,
        faults: FaultSource,
        transfers: TransferModel,
        *,
        max_num_seqs: int,
        speculates: bool = False,
        digests_plans: bool = True,
    ) -> None:
        """`speculates`: whether plans may wait for results, which takes the device's time."""
        self._clock = clock
        self._costs = costs
        self._executor = executor
        self._faults = faults
        self._transfers = transfers
        self._speculates = speculates
        self._num_computed = [0] * max_num_seqs
        """Tokens in the pages of each row."""
        self._free_at_s = 0.0
        self._failed: TimedFuture | None = None
        self.wait_at_most_until_s = math.inf
        """A step that only waits ends then: when a request comes, as a runner's wait is short."""
        self.num_steps = 0
        self.num_failed_steps = 0
        self.busy_s = 0.0
        self.digest = PlanDigest() if digests_plans else None

    def launch(self, plan: Plan) -> Future[StepResult]:
        begin_s = max(self._clock.now_s, self._free_at_s)
        if self._speculates and len(plan.rows) and self._clock.now_s >= self._free_at_s:
            begin_s += self._costs.unoverlapped_step_s
        self._transfers.begin(plan, begin_s)
        load = self._load(plan)
        # Without rows there is nothing to compute: copies begin, and maybe one is waited for.
        duration_s = self._costs.step_s(load) if len(plan.rows) else 0.0
        self._free_at_s = begin_s + duration_s
        self.busy_s += duration_s
        if plan.waits:
            until_s = min(self._next_end_s(plan), self.wait_at_most_until_s)
            self._free_at_s = max(self._free_at_s, until_s)
        self._transfers.pass_to(self._free_at_s)
        self.num_steps += 1
        if self.digest is not None:
            self.digest.add(plan)
        future = TimedFuture(self._clock, self._free_at_s)
        self._carry_out(plan, future, duration_s)
        return future

    def close(self) -> None:
        self._clock.wait_until(self._free_at_s)

    def _next_end_s(self, plan: Plan) -> float:
        end_s = self._transfers.next_end_s
        if end_s is None:
            raise SimulationError(f"step {plan.step_id} waits, and nothing is under way")
        return end_s

    def _carry_out(self, plan: Plan, future: TimedFuture, duration_s: float) -> None:
        # Launched after a failure that the loop does not know of yet: what it reads may never
        # have been written, and whatever it gives will be dropped.
        rests_on_failure = self._failed is not None and not self._failed.is_taken
        if not rests_on_failure and self._faults.step_fails(plan.step_id):
            self._failed = future
            self.num_failed_steps += 1
            self._executor.fail_next = f"step {plan.step_id} was made to fail"
        planned = self._executor.fail_next
        try:
            result = self._executor.execute(plan)
            for draft in plan.drafts:
                num_right = result.num_accepted.get(draft.row, 0)
                self._num_computed[draft.row] -= len(draft.tokens) - num_right
            copies = tuple(self._transfers.timed(done) for done in result.copies)
            future.set_result(replace(result, seconds=duration_s, copies=copies))
        except Exception as error:
            if not rests_on_failure and str(error) != planned:
                raise
            future.set_exception(error)

    def _load(self, plan: Plan) -> StepLoad:
        """Count what the step computes, and note how far each row is then."""
        computed = self._num_computed
        for arrival in plan.arrivals:
            computed[arrival.row] = int(arrival.num_computed_tokens)
        drafted = {draft.row for draft in plan.drafts}
        prefill_tokens = prefill_pairs = decode_rows = context_tokens = 0
        # Lists: most batches are short, and each call of numpy would cost more than a row.
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            before = computed[row]
            computed[row] = before + count
            pairs = count * before + count * (count + 1) // 2
            if count == 1 or row in drafted:
                decode_rows += count
                context_tokens += pairs
            else:
                prefill_tokens += count
                prefill_pairs += pairs
        return StepLoad(
            num_prefill_tokens=prefill_tokens,
            num_prefill_pairs=prefill_pairs,
            num_decode_rows=decode_rows,
            num_context_tokens=context_tokens,
        )
