"""How requests stop running: finished, drained, paused, or retracted to run again.

Owns requests that have left while a launched step still computes them. Until that step is done, a
finished request keeps its row and pages, and a retracted or paused one waits for its token.
"""

from __future__ import annotations

from manyroots.cache.cache import PrefixCache
from manyroots.cache.outcomes import Ending
from manyroots.ids import StepId
from manyroots.lora.registry import Hold
from manyroots.lora.residency import Residency
from manyroots.messages import FinishReason
from manyroots.scheduler.admission import Admission
from manyroots.scheduler.request import Request, State
from manyroots.scheduler.rows import Rows
from manyroots.scheduler.slices import AdapterSlices

ENDINGS = {
    FinishReason.STOP: Ending.FINISHED,
    FinishReason.LENGTH: Ending.FINISHED,
    FinishReason.ABORT: Ending.LEFT,
    FinishReason.ERROR: Ending.DROPPED,
}
"""What to keep of a request for the next turn, by how it ended (H05)."""


class Departures:
    """Takes back rows, pages and adapters."""

    def __init__(
        self,
        cache: PrefixCache,
        adapters: Residency,
        rows: Rows,
        admission: Admission,
        slices: AdapterSlices,
    ) -> None:
        self._cache = cache
        self._adapters = adapters
        self._rows = rows
        self._admission = admission
        self._policy = admission.waiting.policy
        self._slices = slices
        self.leaving: dict[int, Request] = {}
        """By tenancy: requests that ended or were retracted while a launched step computed them."""
        self.num_retractions = 0

    def end(self, request: Request, reason: FinishReason) -> None:
        """The request is finished for its caller; its pages are freed when no launched step writes
        them."""
        if request.state is State.PAUSED:
            self._policy.close(request)
            self._forget_pause(request, ENDINGS[reason])
            request.state = State.FINISHED
            self._let_go(request)
        elif request.row is None:
            self._admission.remove(request)
            self._let_go(request)
        else:
            self._policy.close(request)
            self._rows.settle(request)
            request.ending = ENDINGS[reason]
            if self._rows.is_in_flight(request.row):
                request.state = State.DRAINING
                self.leaving[request.tenancy] = request
            else:
                self._close(request)

    def drained(self, request: Request) -> None:
        """Release a finished request once no launched step computes it."""
        if request.row is not None and not self._rows.is_in_flight(request.row):
            del self.leaving[request.tenancy]
            self._close(request)

    def _close(self, request: Request) -> None:
        """A request is finished, and nothing computes it."""
        self._give_back(request, Ending.DROPPED if request.is_broken else request.ending)
        request.state = State.FINISHED
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """A request is finished: its adapter may be unloaded with it, and then its pages are
        dropped."""
        hold, request.hold = request.hold, None
        if hold is not None:
            self._slices.leave(hold.digest)
            self.release(hold)

    def release(self, hold: Hold) -> None:
        """Nothing holds this adapter content any more: drop what only it needed from the cache."""
        for digest in self._adapters.release(hold):
            self._cache.evict_adapter(digest)

    def retract(self, request: Request, step_id: StepId) -> None:
        """Return a request to the head of the queue. Its published pages stay findable, so it
        resumes from there. Its draws depend on (seed, position), so its tokens stay the same."""
        if request.state is State.PAUSED:
            self._forget_pause(request, Ending.FINISHED)
        else:
            self._stand_up(request)
            self._give_back(request, Ending.FINISHED)
        self._admission.queue_again(request, step_id)
        self.num_retractions += 1

    def pause(self, request: Request) -> None:
        """A request loses its row for a while, and keeps its pages, tokens and progress."""
        row, hold = request.row, request.hold
        assert row is not None
        request.num_computed_tokens = int(self._rows.computed[row])
        self._stand_up(request)
        if hold is not None:
            self._adapters.unseat(hold, is_in_flight=request.num_in_flight_tokens > 0)
        self._rows.leave(request)
        request.state = State.PAUSED

    def _forget_pause(self, request: Request, ending: Ending) -> None:
        """A paused request will not resume from its position."""
        assert request.lease is not None
        self._cache.release(request.lease, ending)
        request.lease = None
        self._slices.drop(request)

    def _stand_up(self, request: Request) -> None:
        """A request loses its row, while launched steps may still compute it."""
        row = request.row
        assert row is not None
        self._rows.hand_over(request)
        self._rows.settle(request)
        request.num_in_flight_tokens = int(self._rows.computed[row] - self._rows.committed[row])
        if request.num_in_flight_tokens:
            self.leaving[request.tenancy] = request

    def _give_back(self, request: Request, ending: Ending) -> None:
        assert request.lease is not None
        self._cache.release(request.lease, ending)
        request.lease = None
        if request.hold is not None:
            in_flight = request.num_in_flight_tokens > 0
            self._adapters.unseat(request.hold, is_in_flight=in_flight)
        self._rows.leave(request)

    def forget(self, request: Request, num_tokens: int) -> None:
        """A launched step is done that computed tokens of a request without a row."""
        request.num_in_flight_tokens -= num_tokens
        if request.num_in_flight_tokens == 0:
            del self.leaving[request.tenancy]

    def member(self, row: int, tenancy: int) -> Request:
        """The request with this tenancy of a row."""
        return self.leaving.get(tenancy) or self._rows.request_at(row)
