"""What holds for every test, set before torch or triton is imported.

With several test processes, each computes on one thread: torch's threads wait for each other by
spinning, and two processes with two threads each on two cores would spend most of their time so.
Without a GPU, Triton's kernels run in its interpreter, which is chosen when triton is imported.
Servers that tests start inherit both. `-n auto` means a process more than this one may use cores,
or as many as memory has room for. What was imported to find the tests is never looked through for
garbage: it is most of a million objects. After each file the rest is, and its memory is given back.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import ssl
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import certifi
import pytest

from tests.helpers.seeded import Draw

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


_new_context, _shared_context = ssl.create_default_context, cache(ssl.create_default_context)


def _context(*args: Any, **options: Any) -> ssl.SSLContext:
    """Share one context: httpx reads all certificates for each call, which takes longer than it."""
    usual = (certifi.where(), os.environ.get("SSL_CERT_FILE"))
    is_httpx = not args and options in [{"cafile": path} for path in usual]
    return (_shared_context if is_httpx else _new_context)(*args, **options)


ssl.create_default_context = _context


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="run tests of drawn cases with this seed alone")
    parser.addoption("--times", type=int, default=1, help="draw so many times as many cases")


def pytest_configure(config: pytest.Config) -> None:
    Draw.only_seed, Draw.times = config.getoption("--seed"), config.getoption("--times")
    gc.disable()


_unfreeze = gc.unfreeze


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # A bench that has measured, and a server that ends, would have all of it looked through again.
    gc.unfreeze = lambda: None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """An engine that is closed is part of cycles, so its model stays until they are collected. The
    C library keeps what is freed between blocks that are not. A process grew to 6.8 GB by both."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        _give_memory_back()


def _give_memory_back() -> None:
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def pytest_unconfigure() -> None:
    gc.unfreeze = _unfreeze
    # Triton's bindings complain of objects that are there at the end. Not yet: pytest looks for
    # garbage twice before, which would take 1.5 s each.
    atexit.register(gc.unfreeze)


GIB_PER_PROCESS = 1.5
"""Most of them take less: a model of 0.5 GB, transformers' beside it, a server with the same."""


@pytest.hookimpl(optionalhook=True)  # of xdist, which need not be there
def pytest_xdist_auto_num_workers() -> int:
    """Not the machine's cores, as xdist would say in a container that may use two of them. One
    more, since tests also wait: for servers that start, timeouts and other processes."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(_cores() + 1, int(gib // GIB_PER_PROCESS)))


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no limit, or none that is told
        return cores
