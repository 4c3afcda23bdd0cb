"""Named tests with a fault planted, each fault in a process forked from one that is warm.

`python -m tests.helpers.planted_tests [TEXT]` runs in a copy of the package and its tests, which
the caller makes; a checkout is refused, because a run that is ended leaves its fault in a file. It
plants each fault that names tests (with a text, those whose name has it) in the copy's file. It
runs these tests, each up to its first case that fails. With a text, it runs those cases without any
fault in the end; without one, the suite does that.

Slow imports happen once, before the forks. There are two ways. First, a process imports the package
and the tests, too. Where a fault changes functions alone, a fork of it gives them the code with the
fault (`code_swap.py`). If this can't be done, or not every named test fails so, the second way
decides: a fork of a process that has not imported the package, which reads the file with the fault.
Both have the file with the fault in place, for tests that read the source or start processes.
Compiled files are keyed by the text of their source. Each line printed is JSON: the fault's name
(null without), and how each case ended.
"""

from __future__ import annotations

import ast
import compileall
import contextlib
import gc
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import anyio.pytest_plugin
import pytest

import tests.conftest  # noqa: F401  what holds for every test is set before torch is imported
from tests.helpers.code_swap import Imported, MustImportError, Swaps
from tests.helpers.detector import bare_pytest
from tests.helpers.mutations import MUTATIONS, Mutation

OWN = ("manyroots", "tests", "tools", "examples")


class _Outcomes:
    """How each case ended, of each of these tests up to the first that fails."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.found: dict[str, str] = {}
        self._nodes = nodes
        self._noticed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True: leave it out."""
        return self._node(item.nodeid) in self._noticed or None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "call":
            self.found[report.nodeid.removeprefix("tests/")] = report.outcome
        if report.failed:
            self._noticed.add(self._node(report.nodeid))

    def _node(self, case: str) -> str:
        return next(node for node in self._nodes if is_of(case.removeprefix("tests/"), node))


def is_of(case: str, node: str) -> bool:
    """Whether a test's name means this case, by itself or with all of its parameters."""
    return case == node or case.startswith(f"{node}[")


def warm_up(chosen: Iterable[Mutation]) -> None:
    """Import all that the package and the named tests import, but nothing of the repository."""
    for path in (*Path("manyroots").rglob("*.py"), *map(Path("tests").joinpath, files_of(chosen))):
        if "ray" not in path.parts:  # its modules start threads
            for statement in ast.parse(path.read_text()).body:
                _import_as(statement)
    loaded = [name for name in sys.modules if name.startswith("manyroots")]
    assert not loaded, f"too late to plant: {loaded}"
    gc.freeze()  # the garbage collector need not scan them in each process


def files_of(chosen: Iterable[Mutation]) -> list[str]:
    return sorted({node.partition("::")[0] for each in chosen for node in each.noticed_by})


def _import_as(statement: ast.stmt) -> None:
    """A module that is missing or not needed costs only time."""
    names = [""]
    match statement:
        case ast.Import():
            modules = [alias.name for alias in statement.names]
        case ast.ImportFrom(module=str(module)):
            modules, names = [module], [alias.name for alias in statement.names]
        case _:
            return
    for module in modules:
        if module.partition(".")[0] not in OWN:
            with contextlib.suppress(ImportError):
                imported = importlib.import_module(module)
                for name in names:  # transformers imports a model when its class is asked for
                    getattr(imported, name, None)


def outcomes(nodes: Iterable[str], swaps: Swaps = ()) -> dict[str, str]:
    """How each of these tests ends in a process forked for them, with functions changed so."""
    chosen = sorted(set(nodes))

    def run() -> dict[str, str]:
        tempfile.tempdir = os.environ["TMPDIR"] = home
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until this process ends
        for function, code in swaps:
            function.__code__ = code
        told = _Outcomes(chosen)
        bare_pytest(*(f"tests/{node}" for node in chosen), plugins=[told, anyio.pytest_plugin])
        return told.found

    # A process that ends early, or with a fault, leaves files; they go with the folder.
    with tempfile.TemporaryDirectory(prefix="mr-") as home:
        return forked(run)


def forked(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What this gives in a process of its own; nothing if that process does not get so far."""
    with tempfile.NamedTemporaryFile("r") as told:
        child = os.fork()
        if not child:
            try:
                Path(told.name).write_text(json.dumps(call()))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found: dict[str, Any] = json.loads(told.read() or "{}")
        return found


@contextlib.contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The file has the fault meanwhile."""
    path = Path("manyroots") / mutation.file
    whole = path.read_text()
    path.write_text(mutation.applied_to(whole))
    try:
        yield
    finally:
        path.write_text(whole)


def by_swapping(chosen: list[Mutation]) -> dict[str, dict[str, str]]:
    """By fault, how its tests ended where they all failed with other code in imported functions.
    Of this process, since it imports what others must not have imported."""
    for file in files_of(chosen):
        importlib.import_module(f"tests.{file.removesuffix('.py').replace('/', '.')}")
    imported = Imported()
    gc.freeze()
    found = {}
    for mutation in chosen:
        with contextlib.suppress(LookupError, MustImportError):
            swaps = swaps_for(mutation, imported)
            with planted(mutation):
                ended = outcomes(mutation.noticed_by, swaps)
            if all(failed_of(ended, node) for node in mutation.noticed_by):
                found[mutation.name] = ended
    return found


def swaps_for(mutation: Mutation, imported: Imported) -> Swaps:
    path = Path("manyroots").resolve() / mutation.file
    text = path.read_text()
    if "triton" in text:
        raise MustImportError(
            "Triton's interpreter reads the source of its functions, not their code"
        )
    if mutation.module not in sys.modules:
        return []  # it is read from the file
    return imported.swaps(str(path), text, mutation.applied_to(text))


def failed_of(ended: dict[str, str], node: str) -> list[str]:
    """The cases of a test that failed."""
    return [case for case, how in ended.items() if how == "failed" and is_of(case, node)]


def tell(name: str | None, found: dict[str, str]) -> None:
    print(json.dumps({"fault": name, "ended": found}), flush=True)


def main() -> int:
    if Path(".git").exists():
        print(
            "this is a checkout, and a run that is ended would leave a fault in it; "
            "use `pytest tests/property/test_mutations.py`, which makes a copy.",
            file=sys.stderr,
        )
        return 2
    text = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [each for each in MUTATIONS if text in each.name and each.noticed_by]
    sys.dont_write_bytecode = True  # no compiled file of a planted fault may remain
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    warm_up(chosen)
    for folder in ("manyroots", "tests"):
        by_text = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder, quiet=1, force=True, invalidation_mode=by_text)
    found = forked(lambda: by_swapping(chosen))
    noticed: set[str] = set()
    for mutation in chosen:
        ended = found.get(mutation.name, {})
        if not ended:
            # A fault that can't be planted is another test's to report; the others can be.
            with contextlib.suppress(LookupError), planted(mutation):
                ended = outcomes(mutation.noticed_by)
        tell(mutation.name, ended)
        noticed.update(case for case, how in ended.items() if how == "failed")
    if text:
        tell(None, outcomes(noticed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
