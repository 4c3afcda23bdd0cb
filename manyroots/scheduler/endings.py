"""How requests stop running: over for their callers, drained, or retracted to run again.

Owns every request that is not over, and those that have left while a launched step still computes
them: till that step is done, a request that is over keeps its row and pages, and one that was
retracted waits for its token.
"""

from __future__ import annotations

from manyroots.cache.cache import PrefixCache
from manyroots.cache.outcomes import Ending
from manyroots.ids import RequestId, StepId
from manyroots.lora.residency import Residency
from manyroots.messages import FinishReason, Output
from manyroots.scheduler.admission import Admission
from manyroots.scheduler.request import Request, State
from manyroots.scheduler.rows import Rows


class Endings:
    """Takes rows, pages and adapters back."""

    def __init__(
        self, cache: PrefixCache, adapters: Residency, rows: Rows, admission: Admission
    ) -> None:
        self._cache = cache
        self._adapters = adapters
        self._rows = rows
        self._admission = admission
        self.requests: dict[RequestId, Request] = {}
        """All that are not over for their callers."""
        self.leaving: dict[int, Request] = {}
        """By stay: requests that ended or were retracted while a launched step computed them."""
        self.num_retractions = 0

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        """As `end`; gives the news of it."""
        self.end(request, reason)
        return Output(
            request_id=request.submit.request_id,
            tokens=[],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            error=error,
        )

    def end(self, request: Request, reason: FinishReason) -> None:
        """The request is over for its caller; its pages go when no launched step writes them."""
        del self.requests[request.submit.request_id]
        if request.row is None:
            self._admission.remove(request)
            self._let_go(request)
        else:
            self._admission.waiting.close(request)
            self._rows.settle(request)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                request.ending = Ending.FINISHED
            if self._rows.is_in_flight(request.row):
                request.state = State.DRAINING
                self.leaving[request.stay] = request
            else:
                self._close(request)

    def drained(self, request: Request) -> None:
        """Let a request go that is over, once no launched step computes it."""
        if request.row is not None and not self._rows.is_in_flight(request.row):
            del self.leaving[request.stay]
            self._close(request)

    def _close(self, request: Request) -> None:
        """A request is over, and nothing computes it."""
        self._give_back(request, request.ending)
        request.state = State.FINISHED
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """A request is over: its adapter may be, too, and then so are its pages."""
        hold, request.hold = request.hold, None
        if hold is not None:
            for digest in self._adapters.release(hold):
                self._cache.evict_adapter(digest)

    def retract(self, request: Request, step_id: StepId) -> None:
        """Back to the head of the queue. What it published stays findable, so that it resumes
        from there; its draws depend on (seed, position), so its tokens stay the same."""
        row = request.row
        assert row is not None
        self._rows.flush(request)
        self._rows.settle(request)
        request.num_in_flight_tokens = int(self._rows.computed[row] - self._rows.committed[row])
        if request.num_in_flight_tokens:
            self.leaving[request.stay] = request
        self._give_back(request, Ending.DROPPED)
        self._admission.queue_again(request, step_id)
        self.num_retractions += 1

    def _give_back(self, request: Request, ending: Ending) -> None:
        assert request.lease is not None
        self._cache.release(request.lease, ending)
        request.lease = None
        if request.hold is not None:
            self._adapters.unseat(request.hold)
        self._rows.leave(request)

    def forget(self, request: Request, num_tokens: int) -> None:
        """A launched step is done that computed tokens of a request without a row."""
        request.num_in_flight_tokens -= num_tokens
        if request.num_in_flight_tokens == 0:
            del self.leaving[request.stay]

    def member(self, row: int, stay: int) -> Request:
        """Whose stay on a row it was."""
        return self.leaving.get(stay) or self._rows.request_at(row)
