"""What holds for every test: with several test processes, each computes on one thread.

Torch's threads wait for each other by spinning; two processes with two threads each on two cores
would spend most of their time so. Set before torch is imported, and inherited by servers that
tests start.
"""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
