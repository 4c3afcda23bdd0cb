"""Delays Ctrl-C while the engine works, and raises it between two steps.

KeyboardInterrupt may be raised between any two instructions of the main thread. Inside a step it
would leave scheduler, cache and runner inconsistent. SIGINT is therefore only recorded there, and
raised at a safe point. Knows nothing of what it protects.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class Interrupts:
    """Works on the main thread; does nothing on others, which get no signals."""

    def __init__(self) -> None:
        self._theirs: Handler = signal.default_int_handler
        """The SIGINT handler outside of `held`."""
        self._is_pending = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Until the block ends, SIGINT waits for `let_through` or for the end."""
        theirs = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        # Not callable: ignored, the system default, or set by code outside of Python.
        if not is_main or self._is_held or not callable(theirs):
            yield
            return
        self._theirs, self._is_pending = theirs, False
        try:
            signal.signal(signal.SIGINT, self._note)
            yield
        finally:
            signal.signal(signal.SIGINT, theirs)
            self._raise_pending()

    def let_through(self) -> None:
        """A safe point: raise a recorded interrupt now."""
        if self._is_pending and self._is_held:
            self._raise_pending()

    @property
    def _is_held(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._note

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_pending = True

    def _raise_pending(self) -> None:
        if self._is_pending:
            self._is_pending = False
            self._theirs(signal.SIGINT, None)
