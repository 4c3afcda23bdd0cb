"""The faults that `make faults` plants can be planted, and the tests that they name exist."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.helpers.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]


def test_there_are_enough_faults_and_each_can_be_planted() -> None:
    assert len(MUTATIONS) >= 100
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        text = (ROOT / "manyroots" / mutation.file).read_text()
        compile(mutation.applied_to(text), mutation.file, "exec")


def test_the_tests_that_must_notice_a_fault_exist() -> None:
    for mutation in MUTATIONS:
        for node in mutation.noticed_by:
            file, _, name = node.partition("::")
            assert name.partition("[")[0] in functions_of(file), f"{mutation.name}: {node}"


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {each.name for each in ast.walk(tree) if isinstance(each, kinds)}
