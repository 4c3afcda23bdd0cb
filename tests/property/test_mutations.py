"""Faults planted in the decide half are noticed: the tests are worth something.

All of them, two at a time, take about 80 s on two idle cores. MANYROOTS_MUTATIONS=text plants only
those whose name has the text.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90
CHOSEN = [m for m in MUTATIONS if os.environ.get("MANYROOTS_MUTATIONS", "") in m.name]
WORKERS = 2


def copy_to(folder: Path) -> None:
    """The package and its tests, without what was compiled."""
    for name in ("manyroots", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def noticed(folder: Path) -> tuple[bool, str]:
    """Whether the detector notices anything in this copy, and what it says."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.detector"],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True, "it never ends"
    said = done.stdout + done.stderr
    assert "noticed:" in said, f"the detector itself failed:\n{said}"
    return done.returncode != 0, said


def try_out(mutation: Mutation, folder: Path) -> tuple[bool, str]:
    copy_to(folder)
    mutation.apply(folder / "manyroots")
    result = noticed(folder)
    shutil.rmtree(folder)
    return result


def test_there_are_enough_faults_and_each_can_be_planted() -> None:
    assert len(MUTATIONS) >= 30
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        text = (ROOT / "manyroots" / mutation.file).read_text()
        assert text.count(mutation.old) == 1, (
            f"{mutation.name}: occurs {text.count(mutation.old)} times; write it anew"
        )
        compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")


@pytest.mark.slow
def test_every_planted_fault_is_noticed(tmp_path: Path) -> None:
    copy_to(tmp_path / "clean")
    is_noticed, said = noticed(tmp_path / "clean")
    assert not is_noticed, f"without any fault:\n{said[-3000:]}"
    folders = [tmp_path / str(number) for number in range(len(CHOSEN))]
    with ThreadPoolExecutor(WORKERS) as pool:
        outcomes = list(pool.map(try_out, CHOSEN, folders))
    missed = [m.name for m, (found, _) in zip(CHOSEN, outcomes, strict=True) if not found]
    assert not missed, f"{len(missed)} of {len(CHOSEN)} faults were not noticed: {missed}"
