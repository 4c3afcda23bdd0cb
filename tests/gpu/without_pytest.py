"""Runs test functions where pytest is not installed: parametrised ones, and those that patch.

Takes modules of tests whose functions need nothing but `parametrize` and `monkeypatch`; gives how
many cases passed, and what the others said. Where pytest is there, its marks are read as well.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any


class MonkeyPatch:
    """As much of pytest's as the tests of kernels use."""

    def __init__(self) -> None:
        self._kept: list[tuple[object, str, Any]] = []

    def setattr(self, target: object, name: str, value: Any) -> None:
        self._kept.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def undo(self) -> None:
        for target, name, value in reversed(self._kept):
            setattr(target, name, value)
        self._kept.clear()


class _Marks:
    def parametrize(self, names: str | tuple[str, ...], values: Any, **options: Any) -> Any:
        def mark(function: Any) -> Any:
            marks = function.__dict__.setdefault("pytestmark", [])
            marks.append(SimpleNamespace(name="parametrize", args=(names, values)))
            return function

        return mark


def stand_in() -> None:
    """Let `import pytest` work where it is not installed."""
    try:
        import pytest  # noqa: F401
    except ModuleNotFoundError:
        module: Any = ModuleType("pytest")
        module.mark = _Marks()
        module.MonkeyPatch = MonkeyPatch
        module.importorskip = lambda name, **options: importlib.import_module(name)
        sys.modules["pytest"] = module


def cases(function: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments of each case of a parametrised test."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args
            split = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
            axes.append(
                [
                    dict(zip(split, value if len(split) > 1 else (value,), strict=True))
                    for value in values
                ]
            )
    for chosen in itertools.product(*axes):
        yield {name: value for part in chosen for name, value in part.items()}


def run_module(name: str) -> tuple[int, list[str]]:
    """How many cases of a module passed, and the others with what they raised."""
    stand_in()
    module = importlib.import_module(name)
    passed, failures = 0, []
    for test_name, function in vars(module).items():
        if not test_name.startswith("test_"):
            continue
        for arguments in cases(function):
            patch = MonkeyPatch()
            if "monkeypatch" in inspect.signature(function).parameters:
                arguments["monkeypatch"] = patch
            try:
                function(**arguments)
                passed += 1
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                shown = {key: str(value)[:40] for key, value in arguments.items()}
                failures.append(f"{test_name} {shown}: {str(error)[:300]!r} ({where.name})")
            finally:
                patch.undo()
    return passed, failures


def check(name: str) -> str:
    """Raise AssertionError if a case fails; else say how many passed."""
    since = time.monotonic()
    passed, failures = run_module(name)
    short = name.rpartition(".")[2]
    assert not failures, f"{short}: {len(failures)} of {passed + len(failures)} cases failed:\n" + (
        "\n".join(failures[:10])
    )
    assert passed, f"{short} has no tests"
    return f"{short}: {passed} cases, {time.monotonic() - since:.1f} s"
