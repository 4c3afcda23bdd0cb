"""Training a policy while it is served, as docs/tutorials/rl-loop.md runs it (A05)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "rl-loop.md"


def test_a05_every_answer_is_by_the_revision_that_it_names() -> None:
    [command] = re.findall(r"^python (examples/rl_loop.py --.*)$", PAGE.read_text(), re.M)
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT,
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) streamed answers of (\d+) revisions, all as PEFT", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) > 10
    assert int(found[2]) > 2, "revisions changed under running streams"
