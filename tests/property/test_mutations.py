"""Faults that are planted are noticed: the tests are worth something.

`python -m tests.detector` plants the decide half's alone. MANYROOTS_MUTATIONS=text plants only
those whose name has the text.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TEXT = os.environ.get("MANYROOTS_MUTATIONS", "")
NAMING = [m for m in MUTATIONS if TEXT in m.name and m.noticed_by]
JOBS = 2


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
            tree = ast.parse((ROOT / "tests" / file).read_text())
            functions = {
                each.name for each in ast.walk(tree)
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }  # fmt: skip
            assert name.partition("[")[0] in functions, f"{mutation.name}: {node}"


@pytest.mark.slow
def test_every_fault_of_the_decide_half_is_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.detector", "--jobs", str(JOBS), TEXT],
        cwd=ROOT, env=environment(ROOT), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests, with what was compiled of them."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("manyroots", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mutation", NAMING, ids=lambda mutation: mutation.breaks)
def test_a_fault_is_noticed_by_the_tests_of_its_promise(mutation: Mutation, copy: Path) -> None:
    """Each of them fails with the fault, and passes without; in a copy, since some read the source
    or start processes."""
    path = copy / "manyroots" / mutation.file
    text = path.read_text()
    path.write_text(mutation.applied_to(text))
    try:
        with_fault = outcomes(copy, mutation.noticed_by)
    finally:
        path.write_text(text)
    for node in mutation.noticed_by:
        cases = [found for found in with_fault if found == node or found.startswith(f"{node}[")]
        assert any(with_fault[case] == "failed" for case in cases), f"{node}: {with_fault}"


@pytest.mark.slow
def test_without_a_fault_the_tests_of_a_promise_pass(copy: Path) -> None:
    nodes = sorted({node for mutation in NAMING for node in mutation.noticed_by})
    ended = outcomes(copy, nodes)
    assert set(ended.values()) == {"passed"}, ended


def outcomes(folder: Path, nodes: list[str] | tuple[str, ...]) -> dict[str, str]:
    """How each test ended, run in this copy."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "--no-header", "-p",
         "no:cacheprovider", *(f"tests/{node}" for node in nodes)],
        cwd=folder, env=environment(folder), capture_output=True, text=True,
    )  # fmt: skip
    found = {}
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        node = rest.partition(" - ")[0].removeprefix("tests/")
        if word in ("PASSED", "FAILED", "ERROR"):
            found[node] = word.lower()
    assert found, f"no tests ran:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return found


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
