"""How long torch's allocator keeps freed memory in the processes that manyroots starts.

On Arm, torch allocates through mimalloc. It returns freed memory to the system after 10 ms, and the
next layer then faults the same pages in again: 6% of a batch's processor time (SmolLM2-135M,
Neoverse-N1). A second is long enough. mimalloc reads the variable when torch is imported, so it
must be set before that, and only in processes of our own: importing the package sets nothing.
"""

from __future__ import annotations

import os

PURGE_DELAY = "MIMALLOC_PURGE_DELAY"
DELAY_MS = "1000"

_is_set_here = False


def keep_freed_memory() -> None:
    """Set the delay in this process, unless the caller's environment has one."""
    global _is_set_here
    if PURGE_DELAY not in os.environ:
        os.environ[PURGE_DELAY] = DELAY_MS
        _is_set_here = True


def engine_environment() -> dict[str, str]:
    """The environment of a process that computes: ours, with the delay unless it is set."""
    return {PURGE_DELAY: DELAY_MS, **os.environ}


def callers_environment() -> dict[str, str]:
    """The environment as the caller gave it, for processes that measure another system."""
    found = dict(os.environ)
    if _is_set_here:
        del found[PURGE_DELAY]
    return found
