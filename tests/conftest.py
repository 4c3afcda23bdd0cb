"""What holds for every test, set before torch or triton is imported.

With several test processes, each computes on one thread: torch's threads wait for each other by
spinning, and two processes with two threads each on two cores would spend most of their time so.
Without a GPU, Triton's kernels run in its interpreter, which is chosen when triton is imported.
Servers that tests start inherit both.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.seeded import Draw

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="run tests of drawn cases with this seed alone")


def pytest_configure(config: pytest.Config) -> None:
    Draw.only_seed = config.getoption("--seed")
