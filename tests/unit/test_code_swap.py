"""Functions that are imported get a changed file's code, or it is said that this can't be."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.code_swap import Imported, MustImportError

TEXT = """
import functools

LIMIT = 3

def twice(x, extra=0):
    return x + x + extra

def made(step):
    def add(x):
        return x + step
    return add

PLUS_ONE = made(1)

@functools.cache
def kept(x):
    return x + 10

class Box:
    def size(self):
        return 1
"""


def imported(path: Path) -> ModuleType:
    path.write_text(TEXT)
    spec = importlib.util.spec_from_file_location("swapped", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new", "call", "before", "after"),
    [
        ("x + x + extra", "x * x + extra", "twice(5)", 10, 25),
        ("x + x + extra", "x * x\n\n", "twice(5)", 10, 25),
        ("x + 10", "x + 20", "kept(1)", 11, 21),
        ("return 1", "return 2", "Box().size()", 1, 2),
        ("x + step", "x - step", "made(1)(1)", 2, 0),
    ],
    ids=["function", "lines", "decorated", "method", "closure"],
)
def test_a_function_gets_the_changed_code(
    tmp_path: Path, old: str, new: str, call: str, before: int, after: int
) -> None:
    module = imported(tmp_path / "swapped.py")
    box = module.Box()
    swaps = Imported().swaps(module.__file__ or "", TEXT, TEXT.replace(old, new))
    if "kept" not in call:  # it would remember
        assert eval(call, vars(module)) == before
    for function, code in swaps:
        function.__code__ = code
    assert eval(call, vars(module)) == after
    assert box.size() == (2 if "size" in call else 1), "an object that was there has it, too"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = 3.0"),
        ("extra=0", "extra=1"),
        ("made(1)", "made(2)"),
        ("@functools.cache", "@functools.lru_cache"),
        ("class Box", "class Box(dict)"),
        ("return 1", "return super().size()"),
    ],
)
def test_what_is_computed_at_import_must_be_imported(tmp_path: Path, old: str, new: str) -> None:
    module = imported(tmp_path / "swapped.py")
    with pytest.raises(MustImportError):
        Imported().swaps(module.__file__ or "", TEXT, TEXT.replace(old, new))


def test_a_function_that_is_gone_is_told(tmp_path: Path) -> None:
    module = imported(tmp_path / "swapped.py")
    del module.Box.size
    with pytest.raises(MustImportError, match=r"Box\.size"):
        Imported().swaps(module.__file__ or "", TEXT, TEXT.replace("return 1", "return 2"))
