"""docs/requirements.md is true: every row is there once, and the tests it names carry its id."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOC = TESTS.parent / "docs" / "requirements.md"
STATES = ("met", "decided", "part", "open")
ROWS = {
    "N": 23,
    "L": 8,
    "W": 20,
    "P": 11,
    "H": 13,
    "C": 7,
    "T": 14,
    "K": 2,
    "S": 7,
    "R": 9,
    "F": 10,
    "Q": 4,
    "G": 11,
    "B": 5,
    "V": 7,
    "A": 7,
    "M": 6,
    "D": 5,
}
"""How many rows each section has: ids are counted from 01 and keep their meaning for ever."""

ROW = re.compile(rf"^\| ([A-Z]\d\d) \| .* \| ({'|'.join(STATES)}) \| (.*?) ?\|$", re.M)
ID = re.compile(rf"\b[{''.join(ROWS)}]\d\d\b")
NAMED = re.compile(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)")


def rows() -> list[tuple[str, str, str]]:
    """Id, state and last cell of each row."""
    found: list[tuple[str, str, str]] = ROW.findall(DOC.read_text())
    return found


def named_in(cell: str) -> list[tuple[str, str]]:
    """(file, test) of a row's last cell."""
    return [
        (file, test)
        for file, names in NAMED.findall(cell)
        for test in re.findall(r"`(\w+)`", names)
    ]


@cache
def named_ids() -> dict[tuple[str, str], set[str]]:
    """(file, test) -> ids in its name or docstring."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = f"{ast.get_docstring(node)} {node.name.upper().replace('_', ' ')}"
                name = path.relative_to(TESTS).as_posix()
                found[name, node.name] = set(ID.findall(text))
    return found


def test_every_row_is_there_exactly_once() -> None:
    wanted = {f"{section}{n:02}" for section, last in ROWS.items() for n in range(1, last + 1)}
    # By any line that begins as a row does: one whose state is misspelt must not go unseen.
    lines = re.findall(r"^\| ([A-Z]\d\d)\b", DOC.read_text(), re.M)
    assert Counter(lines) == Counter(wanted)
    assert [row for row, _, _ in rows()] == lines, f"each row needs a state of {STATES}"


def test_every_test_named_in_the_requirements_exists_and_carries_the_id() -> None:
    tests = named_ids()
    for row, state, cell in rows():
        named = named_in(cell)
        assert bool(named) == (state != "open"), f"{row} is {state} and names {named}"
        assert state != "part" or NAMED.sub("", cell).strip("; ."), f"{row}: what is missing?"
        for key in named:
            assert row in tests.get(key, set()), f"{row} names {key}"


def test_every_id_in_a_test_is_in_the_requirements() -> None:
    listed = {row: set(named_in(cell)) for row, _, cell in rows()}
    for key, ids in named_ids().items():
        for row in ids & set(listed):
            assert key in listed[row], f"{row} does not list {key}"
