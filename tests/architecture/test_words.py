"""One word, one meaning: a class name has one definition, and words given up do not come back."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "manyroots"
SOURCES = sorted(PACKAGE.rglob("*.py"))

GIVEN_UP = {
    "LoadedPart": "Worker",
    "ExecuteHalf": "Executor",
    "AdapterHalf": "AdapterRuntime",
    "adapter_half": "adapter_runtime",
    "Door": "Intake",
    "AdapterDesk": "AdapterDirectory",
    "_desk": "_directory",
    "Draft": "PlanBuilder; a draft is guessed tokens",
    "Endings": "Departures",
    "_next_stay": "_next_tenancy",
    "weight_slots": "weights; a slot is an adapter's place on the device",
    "News": "StepOutputs",
    "Storage": "StorageHealth",
    "Room": "Allocator",
    "Half": "Factor; the halves are decide and execute",
    "has_news": "has_outcomes",
    "Layout": "CacheLayout, AdapterLayout",
    "Limits": "AdapterLimits, SchedulerLimits",
    "Transfers": "UnitTransfers, AdapterTransfers",
    "Angles": "RopeTable",
    "Normed": "UndividedNorm",
}
"""Old names, and what to say instead."""


def classes(path: Path) -> list[str]:
    """The public classes that a file defines, at any depth."""
    tree = ast.parse(path.read_text())
    found = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [name for name in found if not name.startswith("_")]


@cache
def names(path: Path) -> frozenset[str]:
    """Every identifier in a file's code, which is read once for all words."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "name", "asname", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.update(re.split(r"\.", value))
    return frozenset(found)


def test_a_class_name_has_one_definition() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for name in classes(path):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert len(places) > 100
    assert not {name: where for name, where in places.items() if len(where) > 1}


@pytest.mark.parametrize("word", GIVEN_UP)
def test_words_given_up_do_not_come_back(word: str) -> None:
    users = [str(path.relative_to(PACKAGE)) for path in SOURCES if word in names(path)]
    assert not users, f"say {GIVEN_UP[word]}"


def test_names_are_found_wherever_code_has_them(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "from a.door import B as C\nclass D:\n    def e(self, f: G) -> None:\n        self.h(i)\n"
    )
    assert names(file) >= {"a", "door", "B", "C", "D", "e", "f", "G", "h", "i"}
    assert classes(file) == ["D"]
