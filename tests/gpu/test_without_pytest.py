"""The small runner of tests: every case runs, and one that fails is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gpu.without_pytest import check, run_module

MODULE = """
import pytest

VALUE = 1

@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.parametrize(("one", "other"), [(1, 1), (2, 2)], ids=["a", "b"])
def test_each_combination(one, other, left):
    assert one == other

def test_patched(monkeypatch):
    import planted
    monkeypatch.setattr(planted, "VALUE", 2)
    assert planted.VALUE == 2

def test_unpatched_again():
    import planted
    assert planted.VALUE == 1

@pytest.mark.parametrize("number", [4, 5])
def test_some(number):
    assert number != WRONG
"""


@pytest.fixture(params=["with pytest", "without"])
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A module of tests, where pytest is installed and where it is not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "pytest", None)
    return tmp_path / "planted.py"


def test_every_case_runs_and_patches_are_taken_back(planted: Path) -> None:
    planted.write_text(MODULE + "\nWRONG = 0\n")
    assert run_module("planted") == (10, [])
    assert "10 cases" in check("planted")


def test_a_case_that_fails_is_told_with_its_arguments(planted: Path) -> None:
    planted.write_text(MODULE + "\nWRONG = 5\n")
    passed, [failure] = run_module("planted")
    assert passed == 9
    assert "test_some {'number': '5'}" in failure
    with pytest.raises(AssertionError, match="1 of 10 cases failed"):
        check("planted")
