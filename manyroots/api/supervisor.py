"""Keeps the API process alive: the parent of `manyroots serve`.

Takes a function that serves until told to stop and gives an exit code. It runs in a child process,
which is started again if a signal ends it: a crash in native code, or the machine out of memory.
The parent holds the listening socket and does nothing else, so that callers can connect meanwhile.
The engine is the child's, and ends and starts with it.

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


def supervise(serve: Callable[[Life], int], *, max_restarts: int) -> int:
    """Run `serve` in a child process until it ends by itself; gives its exit code. 1 after
    `max_restarts` deaths in a row."""
    return _Supervisor(serve, max_restarts).run()


class _Supervisor:
    def __init__(self, serve: Callable[[Life], int], max_restarts: int) -> None:
        self._serve = serve
        self._max_restarts = max_restarts
        self._num_signals = 0
        self._orders: int | None = None

    def run(self) -> int:
        usual = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            return self._lives()
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1
        if self._orders is not None:
            with contextlib.suppress(OSError):
                os.write(self._orders, b"s")

    def _lives(self) -> int:
        num_restarts = num_in_a_row = 0
        while True:
            begin = time.monotonic()
            code = self._life(num_restarts)
            if code >= 0:
                return code
            cause = f"the API process was killed by {signal.Signals(-code).name}"
            if self._num_signals:
                logger.error("%s while it was ending", cause)
                return 1
            if time.monotonic() - begin >= GOOD_LIFE_S:
                num_in_a_row = 0
            if num_in_a_row >= self._max_restarts:
                logger.error("giving up: %s; it was started again %d times in a row",
                             cause, num_in_a_row)  # fmt: skip
                return 1
            pause_s = 2.0 ** (num_in_a_row - 1) if num_in_a_row else 0.0
            num_in_a_row += 1
            num_restarts += 1
            logger.error("%s; starting it again in %g s (%d of %d in a row). Requests that it had "
                         "are lost, and its engine loads anew",
                         cause, pause_s, num_in_a_row, self._max_restarts)  # fmt: skip
            if not self._paused(pause_s):
                return 0

    def _paused(self, seconds: float) -> bool:
        """Whether no signal came meanwhile."""
        end = time.monotonic() + seconds
        while not self._num_signals and time.monotonic() < end:
            time.sleep(_POLL_S)
        return not self._num_signals

    def _life(self, num_restarts: int) -> int:
        """One child, to its end: its exit code, or the negative number of a signal."""
        ear, self._orders = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(self._orders)
            _live(self._serve, Life(ear, num_restarts))
        os.close(ear)
        _, status = os.waitpid(pid, 0)
        orders, self._orders = self._orders, None
        os.close(orders)
        return os.waitstatus_to_exitcode(status)


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
