"""docs/requirements.md is true: every test it names exists and carries the row's id."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOC = TESTS.parent / "docs" / "requirements.md"
ROW = re.compile(r"^\| ([A-Z]\d\d) \| .* \| (met|part|open) \| (.*) \|$", re.M)
ID = re.compile(r"\b[NLWPHCTKSR]\d\d\b")


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


def test_every_test_named_in_the_requirements_exists_and_carries_the_id() -> None:
    tests = named_ids()
    rows = ROW.findall(DOC.read_text())
    assert len(rows) == 103
    for row, state, cell in rows:
        named = [
            (file, test)
            for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", cell)
            for test in re.findall(r"`(\w+)`", names)
        ]
        assert bool(named) == (state != "open"), f"{row} is {state} and names {named}"
        for key in named:
            assert row in tests.get(key, set()), f"{row} names {key}"


def test_every_id_in_a_test_is_in_the_requirements() -> None:
    rows = {row: cell for row, _, cell in ROW.findall(DOC.read_text())}
    for (file, test), ids in named_ids().items():
        for row in ids & set(rows):
            assert f"`{test}`" in rows[row], f"{row} does not list {file}::{test}"
