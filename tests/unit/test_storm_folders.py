"""A storm that was killed leaves its folder to the next one, which takes it away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.storm_folders import storm_folder


def test_folders_of_killed_storms_go_and_those_of_running_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from tests.helpers.storm_folders import storm_folder as make; "
    code += "print(make('x'), flush=True); "
    storms = [
        subprocess.Popen(
            [sys.executable, "-c", code + "input()"], cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    folders = []
    for storm in storms:
        assert storm.stdout is not None
        folders.append(Path(storm.stdout.readline().strip()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    of_another_kind = tmp_path / "manyroots-y-1-abc"
    of_another_kind.mkdir()
    storms[0].send_signal(signal.SIGKILL)
    storms[0].wait()
    assert folders[0].is_dir(), "there was one to be left"
    mine = storm_folder("x")
    assert sorted(tmp_path.iterdir()) == sorted([folders[1], mine, of_another_kind])
    storms[1].communicate("\n")
    assert not folders[1].exists()
