"""A test that hangs ends, and is named: the suite can't hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import PATIENCE_S

HANGS = """
import threading

def test_that_waits_for_ever():
    threading.Event().wait()
"""


def test_a_test_that_hangs_ends_its_process_and_is_named(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """With the suite's own settings, but for the time."""
    assert 0 < float(pytestconfig.getini("faulthandler_timeout")) <= 1200
    (tmp_path / "test_hangs.py").write_text(HANGS)
    settings = ["-c", str(pytestconfig.inipath), "-o", "faulthandler_timeout=0.5"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *settings, "--rootdir", str(tmp_path), "-p",
         "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Timeout" in done.stderr
    assert "test_that_waits_for_ever" in done.stderr
