"""The decide half's faults, which the detector must notice (`tests/helpers/detector.py`).

MANYROOTS_MUTATIONS=text plants only those whose name has the text.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_fault_of_the_decide_half_is_noticed() -> None:
    """In one process after the other: more at once would slow down what other tests measure."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.detector", "--jobs", "1",
         os.environ.get("MANYROOTS_MUTATIONS", "")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
