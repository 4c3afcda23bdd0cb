"""Runs the detector on a part of the decide half's faults.

The parts are tests in files of their own, so that the test processes share them; none starts
further processes beside its own, which would slow down what the other measures.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).parent.glob("test_mutations_of_the_decide_half_*.py"))


def detect_slice(file: str) -> None:
    """The part of this file. MANYROOTS_MUTATIONS=text plants only those whose name has the text."""
    number = [each.name for each in FILES].index(Path(file).name)
    text = os.environ.get("MANYROOTS_MUTATIONS", "")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.detector", "--jobs", "1", "--slice",
         f"{number}/{len(FILES)}", text],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
