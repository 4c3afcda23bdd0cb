"""The example that trains a policy while it is served, with fewer revisions than by hand (A05)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


def test_a05_every_answer_is_by_the_revision_that_it_names() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--revisions", "4", "--streams", "2"],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) streamed answers of (\d+) revisions, all as PEFT", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) > 10
    assert int(found[2]) > 2, "revisions changed under running streams"
