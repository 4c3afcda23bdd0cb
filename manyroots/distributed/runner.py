"""A runner that is several: one plan for all ranks, the first rank's result for the engine.

Takes the first rank's own runner and the other ranks. Every plan goes to all of them, in the same
order; they meet inside the step. A step is whole or the engine is over: a rank that dies or fails
leaves the others inside an operation that can't end, so every launched step fails at once with
`UnavailableError`, and so does every later one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from manyroots.distributed.ranks import Ranks
from manyroots.distributed.wire import RankMessageKind
from manyroots.errors import UnavailableError
from manyroots.step import AdapterLoaded, CopyDone, Plan, Runner, StepResult

logger = logging.getLogger(__name__)

BLAME_WAIT_S = 2.0
"""How long a failed step waits for the news that another rank caused it."""


class RankedRunner:
    """The first rank's runner, with the others in step."""

    def __init__(
        self,
        own: Runner,
        ranks: Ranks,
        *,
        on_adapter: Callable[[int, AdapterLoaded], None],
        on_copy: Callable[[int, CopyDone], None],
        on_death: Callable[[str], None],
        leave: Callable[[], None],
    ) -> None:
        """`on_death` is called once, from a thread of ours; `leave` when nothing runs any more."""
        self._own = own
        self._ranks = ranks
        self._hears: dict[RankMessageKind, Callable[[int, Any], None]] = {
            RankMessageKind.ADAPTER: on_adapter,
            RankMessageKind.COPY: on_copy,
        }
        self._on_death = on_death
        self._leave = leave
        self._lock = threading.Lock()
        self._under_way: set[Future[StepResult]] = set()
        self._death: str | None = None
        self._died = threading.Event()
        ranks.watch(self._hear, self._die)

    def launch(self, plan: Plan) -> Future[StepResult]:
        """Queue a plan on every rank; returns at once."""
        promised: Future[StepResult] = Future()
        with self._lock:
            if self._death is not None:
                raise UnavailableError(self._death)
            self._under_way.add(promised)
        self._ranks.send(RankMessageKind.PLAN, plan)
        self._own.launch(plan).add_done_callback(lambda done: self._settle(promised, done))
        return promised

    def close(self) -> None:
        if self._death is None:
            # The others are still needed by what was launched.
            self._own.close()
        self._ranks.close()
        if self._death is not None:
            # The last rank's end has ended what the first was waiting for.
            self._own.close()
        self._leave()

    def _settle(self, promised: Future[StepResult], done: Future[StepResult]) -> None:
        error = done.exception()
        if error is not None:
            # Where another rank died, our own failure is only its echo.
            if not self._died.wait(BLAME_WAIT_S):
                self._die(f"rank 0 failed: {error}")
            return
        with self._lock:
            is_wanted = promised in self._under_way
            self._under_way.discard(promised)
        if is_wanted:  # else another rank died, and the step has failed for its caller
            promised.set_result(done.result())

    def _hear(self, rank: int, kind: RankMessageKind, body: Any) -> None:
        self._hears[kind](rank, body)

    def _die(self, reason: str) -> None:
        with self._lock:
            if self._death is not None:
                return
            self._death = f"{reason}; the other ranks can't go on without it. Start again."
            under_way, self._under_way = self._under_way, set()
        logger.error("%s", self._death)
        self._ranks.kill()
        self._died.set()
        for promised in under_way:
            promised.set_exception(UnavailableError(self._death))
        self._on_death(self._death)
