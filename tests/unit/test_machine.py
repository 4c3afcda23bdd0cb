"""What a machine lacks is told before a run, each thing with its remedy."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from manyroots.errors import ModelError
from tests import conftest
from tests.helpers import machine


def test_what_is_missing_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> Path:
        raise ModelError("the index can't be reached")

    monkeypatch.setattr(machine, "packaged_model_path", refuse)
    monkeypatch.setattr(machine, "ROOT", tmp_path / "gone")
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda _: namedtuple("Usage", "free")(2**20),
    )
    assert machine.main() == 1
    said = capsys.readouterr().err
    assert "use TMPDIR" in said
    assert "gone can't be written to" in said
    assert said.count("the index can't be reached") == 2


def test_there_is_one_more_test_process_than_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conftest.os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(Path, "read_text", lambda _: "200000 100000\n")
    assert conftest.pytest_xdist_auto_num_workers() == 3
    monkeypatch.setattr(Path, "read_text", lambda _: "max 100000\n")
    monkeypatch.setattr(conftest.os, "sysconf", lambda name: 2**12 if "SIZE" in name else 2**20)
    assert conftest.pytest_xdist_auto_num_workers() == 2, "4 GiB"
