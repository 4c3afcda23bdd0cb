"""Faults that are planted are noticed: the tests are worth something.

Here are those that name the tests that must notice them; the others are the decide half's, and are
planted by `test_mutations_of_the_decide_half.py`. MANYROOTS_MUTATIONS=text plants only those
whose name has the text, and then runs what noticed them without a fault, too. The suite as a whole
runs these tests anyway, in a folder with the same files.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.mutations import MUTATIONS, Mutation
from tests.helpers.planted_tests import is_of

ROOT = Path(__file__).parents[2]
TEXT = os.environ.get("MANYROOTS_MUTATIONS", "")
NAMING = [m for m in MUTATIONS if TEXT in m.name and m.noticed_by]
Ended = dict[str | None, dict[str, str]]


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


def copied(folder: Path) -> None:
    """Package and tests as files of their own, and links to all that lies beside them."""
    for path in ROOT.iterdir():
        if path.name in ("manyroots", "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name not in (".git", ".venv"):
            (folder / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """By fault, how the tests that it names ended in a copy of the package; and by None, how those
    that noticed one end without."""
    folder = tmp_path_factory.mktemp("copy")
    copied(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.planted_tests", TEXT],
        cwd=folder, env=environment(folder), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    yield {line["fault"]: line["ended"] for line in lines}
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", NAMING, ids=lambda mutation: mutation.breaks)
def test_a_fault_is_noticed_by_the_tests_of_its_promise(mutation: Mutation, ended: Ended) -> None:
    """Of each of them a case fails with the fault."""
    with_fault = ended[mutation.name]
    for node in mutation.noticed_by:
        noticed = [c for c, how in with_fault.items() if how == "failed" and is_of(c, node)]
        assert noticed, f"{node}: {with_fault}"
        if TEXT:
            assert {ended[None].get(case) for case in noticed} == {"passed"}, noticed


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
