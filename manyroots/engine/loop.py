"""The engine's loop: drain, schedule, launch, advance, emit.

The next step is planned and launched while the current one runs (depth 1), so that the runner
never waits for planning. Knows neither HTTP, text nor tensors; one thread calls it.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future

from manyroots.engine.alarm import Alarm
from manyroots.errors import NotFoundError, UnavailableError
from manyroots.messages import Abort, FinishReason, Output, Stats, Submit
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import Runner, StepResult

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""A runner that fails this often without one good step is taken for dead."""


class EngineLoop:
    """Drives one scheduler and one runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        alarm: Alarm | None = None,
        depth: int = 1,
    ) -> None:
        """`alarm`: None if the runner can't end outside of a step."""
        self._scheduler = scheduler
        self._runner = runner
        self._alarm = alarm
        self._depth = depth
        self._launched: deque[Future[StepResult]] = deque()
        self._news: list[Output] = []
        self._failures_in_a_row = 0

    @property
    def has_work(self) -> bool:
        if self._alarm is not None and self._alarm.reason is not None:
            return True
        return bool(self._news) or self._scheduler.has_work

    def handle(self, message: Submit | Abort) -> None:
        """Take one message from a client."""
        if isinstance(message, Submit):
            try:
                self._scheduler.submit(message)
            except NotFoundError as error:
                # The door knew the adapter; it was unloaded on the way here.
                self._news.append(
                    Output(message.request_id, [], FinishReason.ERROR, 0, error=str(error))
                )
            return
        for request_id in message.request_ids:
            output = self._scheduler.abort(request_id)
            if output is not None:
                self._news.append(output)

    def step(self) -> list[Output]:
        """Launch the next step, wait for the one before it, and give the news so far.

        Raises UnavailableError if there will be no further step.
        """
        if self._alarm is not None and self._alarm.reason is not None:
            raise UnavailableError(self._alarm.reason)
        plan = self._scheduler.schedule()
        if plan is not None:
            self._launched.append(self._runner.launch(plan))
        if len(self._launched) > self._depth or (plan is None and self._launched):
            self._finish_oldest()
        news, self._news = self._news, []
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
        self._news.extend(self._scheduler.advance(result))

    def _recover(self, error: Exception) -> None:
        """A step failed: fail its requests and those that may lean on it, and go on."""
        logger.exception("step failed", exc_info=error)
        for future in self._launched:
            if future.exception() is None:  # waits
                # Its tokens rest on the failed step; the copies that ended with it do not.
                self._news.extend(self._scheduler.take_arrivals(future.result()))
        self._launched.clear()
        reason = f"the step that computed this request failed: {error}"
        self._news.extend(self._scheduler.fail_in_flight(reason))
        if isinstance(error, UnavailableError):
            raise error
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise UnavailableError(
                f"{self._failures_in_a_row} steps in a row failed, the last with: {error}"
            ) from error
