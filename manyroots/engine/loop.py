"""The engine's loop: drain, schedule, launch, advance, emit.

The next step is planned and launched while the current one runs (depth 1), so that the runner
never waits for planning. Knows neither HTTP, text nor tensors; one thread calls it.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future

from manyroots.errors import NotFoundError, UnavailableError
from manyroots.messages import Abort, FinishReason, News, Output, Stats, Submit
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import Runner, StepResult

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""A runner that fails this often without one good step is taken for dead."""


class EngineLoop:
    """Drives one scheduler and one runner."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, depth: int = 1) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._launched: deque[Future[StepResult]] = deque()
        self._news = News([])
        self._failures_in_a_row = 0

    @property
    def has_work(self) -> bool:
        return len(self._news) > 0 or self._scheduler.has_work

    def handle(self, message: Submit | Abort) -> None:
        """Take one message from a client."""
        if isinstance(message, Submit):
            try:
                self._scheduler.submit(message)
            except NotFoundError as error:
                # The door knew the adapter; it was unloaded on the way here.
                self._news.outputs.append(
                    Output(message.request_id, [], FinishReason.ERROR, 0, error=str(error))
                )
            return
        for request_id in message.request_ids:
            output = self._scheduler.abort(request_id)
            if output is not None:
                self._news.outputs.append(output)

    def step(self) -> News:
        """Launch the next step, wait for the one before it, and give the news so far."""
        plan = self._scheduler.schedule()
        if plan is not None:
            self._launched.append(self._runner.launch(plan))
        if len(self._launched) > self._depth or (plan is None and self._launched):
            self._finish_oldest()
        news, self._news = self._news, News([])
        return news

    def stats(self) -> Stats:
        return self._scheduler.stats()

    def close(self) -> None:
        self._runner.close()

    def _finish_oldest(self) -> None:
        try:
            result = self._launched.popleft().result()
        except Exception as error:
            self._recover(error)
            return
        self._failures_in_a_row = 0
        news = self._scheduler.advance(result)
        self._news.outputs.extend(news.outputs)
        self._news.tokens = news.tokens  # one result a step: nothing is there yet

    def _recover(self, error: Exception) -> None:
        """A step failed: fail its requests and those that may lean on it, and go on."""
        logger.exception("step failed", exc_info=error)
        for future in self._launched:
            if future.exception() is None:  # waits
                # Its tokens rest on the failed step; the copies that ended with it do not.
                self._news.outputs.extend(self._scheduler.take_arrivals(future.result()))
        self._launched.clear()
        reason = f"the step that computed this request failed: {error}"
        self._news.outputs.extend(self._scheduler.fail_in_flight(reason))
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise UnavailableError(
                f"{self._failures_in_a_row} steps in a row failed, the last with: {error}"
            ) from error
