"""Keeps the API process alive: the parent of `manyroots serve`.

Takes a function that serves until told to stop and gives an exit code. It runs in a child process,
which is started again if a signal ends it: a crash in native code, or the machine out of memory.
The parent holds the listening socket and does nothing else, so that callers can connect meanwhile.
The engine is the child's, and ends and starts with it. With several gateways there is a child for
each, and the engines belong to one more, the router.

The parent alone takes SIGTERM and SIGINT, and passes each one on through a pipe. So a signal that
goes to the whole process group counts once, and the pipe's end tells the child that the parent is
gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from manyroots.errors import ManyrootsError

logger = logging.getLogger("manyroots")

GOOD_LIFE_S = 300.0
"""A process that served this long had a good life: its death is the first in a row again."""
_POLL_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Life:
    """What a child is told when it starts."""

    orders: int
    """A pipe: a byte for each signal, and its end when the parent is gone."""
    num_restarts: int
    """Of API processes before it."""


def supervise(
    serve: Callable[[Life], int],
    *more: Callable[[Life], int],
    max_restarts: int,
    router: Callable[[Life], int] | None = None,
) -> int:
    """Run `serve`, and `more`, each in a child process until it ends by itself; gives the exit code
    of the first that does. 1 after `max_restarts` deaths in a row. `router` is a process that the
    others need: it is told to stop when they have ended."""
    children = [_Child(each, "API") for each in (serve, *more)]
    if router is not None:
        children.append(_Child(router, "router", is_needed=True))
    return _Supervisor(children, max_restarts).run()


class _Child:
    """One of the processes, and its successors."""

    def __init__(self, serve: Callable[[Life], int], name: str, *, is_needed: bool = False) -> None:
        self.name = name
        self.is_needed = is_needed
        self._serve = serve
        self.pid: int | None = None
        self._orders: int | None = None
        self.code: int | None = None
        """When it has ended for good."""
        self.begin = 0.0
        self.due = 0.0
        """When it is to be started."""
        self.num_restarts = self.num_in_a_row = 0

    def start(self, others: list[_Child]) -> None:
        ear, self._orders = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.begin = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            # The end of a pipe must say that the parent is gone, whatever its other children do.
            for child in others:
                if child._orders is not None:
                    os.close(child._orders)
            _live(self._serve, Life(ear, self.num_restarts))
        os.close(ear)

    def tell(self) -> None:
        """That it should stop."""
        if self._orders is not None:
            with contextlib.suppress(OSError):
                os.write(self._orders, b"s")

    def ended(self) -> None:
        self.pid = None
        if self._orders is not None:
            os.close(self._orders)
            self._orders = None

    @property
    def is_over(self) -> bool:
        return self.code is not None


class _Supervisor:
    def __init__(self, children: list[_Child], max_restarts: int) -> None:
        self._children = children
        self._max_restarts = max_restarts
        self._num_signals = 0
        self._is_stopping = False

    def run(self) -> int:
        usual = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            return self._lives()
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1
        self._stop()

    def _stop(self) -> None:
        """Tell those that others do not need; each signal counts."""
        self._is_stopping = True
        for child in self._children:
            if not child.is_needed or self._num_signals > 1:
                child.tell()

    def _lives(self) -> int:
        """Until all have ended; the first exit code counts."""
        codes: list[int] = []
        while True:
            self._start_due()
            alive = [child for child in self._children if not child.is_over]
            if not alive:
                return next((code for code in codes if code), 0)
            if all(child.is_needed for child in alive):
                for child in alive:
                    child.tell()
            ended, code = self._next_end()
            if ended is None:
                continue
            ended.code = self._judged(ended, code)
            if ended.code is not None:
                codes.append(ended.code)
                if not self._is_stopping:
                    self._stop()

    def _start_due(self) -> None:
        for child in self._children:
            if child.pid is None and not child.is_over:
                if self._is_stopping:
                    child.code = 0
                elif time.monotonic() >= child.due:
                    child.start(self._children)

    def _next_end(self) -> tuple[_Child | None, int]:
        """The next child that ends, or None after a while if some are to be started."""
        is_waiting = any(child.pid is None and not child.is_over for child in self._children)
        pid, status = 0, 0
        if any(child.pid is not None for child in self._children):
            pid, status = os.waitpid(-1, os.WNOHANG if is_waiting else 0)
        if pid == 0:
            time.sleep(_POLL_S)
            return None, 0
        child = next((child for child in self._children if child.pid == pid), None)
        if child is not None:
            child.ended()
        return child, os.waitstatus_to_exitcode(status)

    def _judged(self, child: _Child, code: int) -> int | None:
        """The exit code of a child that is over; None if it is to be started again."""
        if code >= 0:
            return code
        cause = f"the {child.name} process was killed by {signal.Signals(-code).name}"
        if self._is_stopping:
            logger.error("%s while it was ending", cause)
            return 1
        if time.monotonic() - child.begin >= GOOD_LIFE_S:
            child.num_in_a_row = 0
        if child.num_in_a_row >= self._max_restarts:
            logger.error("giving up: %s; it was started again %d times in a row",
                         cause, child.num_in_a_row)  # fmt: skip
            return 1
        pause_s = 2.0 ** (child.num_in_a_row - 1) if child.num_in_a_row else 0.0
        child.due = time.monotonic() + pause_s
        child.num_in_a_row += 1
        child.num_restarts += 1
        engine = ", and its engine loads anew" if len(self._children) == 1 else ""
        logger.error("%s; starting it again in %g s (%d of %d in a row). Requests that it had "
                     "are lost%s",
                     cause, pause_s, child.num_in_a_row, self._max_restarts, engine)  # fmt: skip
        return None


def _live(serve: Callable[[Life], int], life: Life) -> None:
    """The child's whole life; never returns."""
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: None)
    code = 1
    try:
        # Where a crash was, for the log.
        faulthandler.enable()
        code = serve(life)
    except ManyrootsError as error:
        print(f"manyroots: {error}", file=sys.stderr)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
