"""Plants the faults that name tests, in a copy of the package: `planted(folder, text)`.

`tests/helpers/planted_tests.py` runs in the copy; `tests/helpers/detector.py` plants the others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
Ended = dict[str | None, dict[str, str]]
"""By fault, how each case of the tests that it names ended; by None, how they end without one."""


def planted(folder: Path, text: str = "") -> Ended:
    """Plant each fault whose name has the text, in a copy in `folder`, which is removed after."""
    _copy(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.planted_tests", text],
        cwd=folder, env=environment(folder), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    shutil.rmtree(folder)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["fault"]: line["ended"] for line in lines}


def detected(text: str = "") -> None:
    """Plant each fault of the decide half whose name has the text. One that no check notices is an
    error. In one process after the other: more would slow down what other tests measure."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.detector", "--jobs", "1", text],
        cwd=ROOT, env=environment(ROOT), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def is_of(case: str, node: str) -> bool:
    """Whether a test's name means this case, by itself or with all of its parameters."""
    return case == node or case.startswith(f"{node}[")


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def _copy(folder: Path) -> None:
    """Package and tests as files of their own, and links to all that lies beside them."""
    for path in ROOT.iterdir():
        if path.name in ("manyroots", "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name not in (".git", ".venv"):
            (folder / path.name).symlink_to(path)
