"""Steps one at a time, so that a test sees every plan."""

from __future__ import annotations

from manyroots.messages import Submit
from manyroots.step import Plan
from tests.helpers.scheduler_harness import SchedulerHarness


class Stepping(SchedulerHarness):
    """An engine whose plans are kept; each step ends before the next is planned."""

    def __init__(self, **settings: object) -> None:
        super().__init__(depth=0, **settings)  # type: ignore[arg-type]
        self.plans: list[Plan] = []
        self.row_of: dict[int, int] = {}

    def take(self, *requests: Submit) -> None:
        for request in requests:
            self.loop.handle(request)

    def one(self) -> dict[int, int]:
        """The next step. Gives how many tokens each request computes in it."""
        plan = self.scheduler.schedule()
        if plan is None:
            return {}
        self.plans.append(plan)
        for arrival in plan.arrivals:
            self.row_of = {n: r for n, r in self.row_of.items() if r != arrival.row}
            self.row_of[int(arrival.request_id)] = int(arrival.row)
        by_row = {row: number for number, row in self.row_of.items()}
        for output in self.scheduler.advance(self.runner.execute(plan)):
            self.outputs.setdefault(int(output.request_id), []).append(output)
        counts = zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)
        return {by_row[row]: count for row, count in counts}

    def all(self) -> list[dict[int, int]]:
        """Every step until no request has anything left."""
        steps = []
        while self.scheduler.has_work:
            steps.append(self.one())
            assert len(steps) < 5000, "no end"
        return steps

    def began(self) -> list[int]:
        """Requests in the order in which they began; one that began again is there twice."""
        return [int(a.request_id) for plan in self.plans for a in plan.arrivals]
