"""Work that grows with a request, off the event loop.

Takes a function; gives what it gives, from a thread. One thread for Python that takes long, since
each further one would keep the event loop waiting for the interpreter; one for waiting for the
helper that tries grammars. Work that lets go of the interpreter (tokenizers) has asyncio's own
threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

_WORK = ThreadPoolExecutor(1, thread_name_prefix="aside")
_GRAMMARS = ThreadPoolExecutor(1, thread_name_prefix="grammars")


async def aside(job: Callable[[], T]) -> T:
    """Run Python code that takes long."""
    return await _run(_WORK, job)


async def grammar_aside(job: Callable[[], T]) -> T:
    """Run what may wait for the helper process of grammars."""
    return await _run(_GRAMMARS, job)


async def _run(threads: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(threads, lambda: context.run(job))
