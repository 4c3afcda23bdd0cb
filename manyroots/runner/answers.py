"""Futures of steps' results."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Lock

from manyroots.runner.step_timer import TakeResult
from manyroots.step import StepResult


class AnsweredWhenAsked(Future[StepResult]):
    """A launched step whose result the asking thread makes itself."""

    def __init__(self, answer: TakeResult) -> None:
        super().__init__()
        self._answer = answer
        self._asking = Lock()

    def result(self, timeout: float | None = None) -> StepResult:
        self._ask()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._ask()
        return super().exception(timeout)

    def _ask(self) -> None:
        with self._asking:
            if not self.done():
                resolve(self, self._answer)


def resolve(future: Future[StepResult], answer: TakeResult) -> None:
    """Wait for a step, and give its future the result."""
    try:
        result = answer()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
