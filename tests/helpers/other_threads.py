"""Tells whether a call lets other Python threads run, without a clock that a busy machine bends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

MAX_CALLS = 2000


def lets_others_run(call: Callable[[], object]) -> bool:
    """Whether another thread ever ran during one of many calls.

    Threads are not switched by time meanwhile. So the other one runs only if the call itself
    releases the interpreter's lock.
    """
    num_runs = 0
    is_over = threading.Event()

    def run() -> None:
        nonlocal num_runs
        while not is_over.is_set():
            num_runs += 1
            time.sleep(1e-5)

    interval_s = sys.getswitchinterval()
    other = threading.Thread(target=run)
    other.start()
    sys.setswitchinterval(1000)
    try:
        for _ in range(MAX_CALLS):
            before = num_runs
            call()
            if num_runs != before:
                return True
        return False
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        other.join()
