"""What a process holds when it is ready to serve is no garbage, and is not looked through again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_for_good() -> None:
    """Have Python's collector leave alone all that is there now. A server's modules alone are some
    360,000 objects, and all requests wait while it looks through them."""
    gc.collect()
    gc.freeze()


@contextmanager
def kept_meanwhile() -> Iterator[None]:
    """The same for a while, in which something is measured."""
    keep_for_good()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def taken_apart_at_exit() -> Iterator[None]:
    """Around a process's whole life: what was kept is garbage like all else when it ends. Bindings
    (triton's) list whatever is left by then as leaked."""
    try:
        yield
    finally:
        gc.unfreeze()
