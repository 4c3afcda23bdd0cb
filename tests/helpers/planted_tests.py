"""Named tests with a fault planted, each fault in a process forked from one that is warm.

`python -m tests.helpers.planted_tests [TEXT]` runs in a copy of the package and its tests, which
the caller makes; a checkout is refused, because a run that is ended leaves its fault in a file. It
plants each fault that names tests (with a text, those whose name has it) in the copy's file. It
runs these tests, each up to its first case that fails. With a text, it runs those cases without any
fault in the end; without one, the suite does that.

The slow imports of a test process happen once, before the forks, unless faults are few. The package
itself is not imported then, so each process reads the file as it is at that time, and so do tests
that read the source or start processes. Compiled files are keyed by the text of their source. Each
line printed is JSON: the fault's name (null without), and how each case ended.
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
from collections.abc import Iterable
from pathlib import Path
from py_compile import PycInvalidationMode

import anyio.pytest_plugin
import pytest

import tests.conftest  # noqa: F401  what holds for every test is set before torch is imported
from tests.helpers.detector import bare_pytest
from tests.helpers.mutations import MUTATIONS
from tests.helpers.plant import is_of

OWN = ("manyroots", "tests", "tools", "examples")
ROOMS_LEFT_OUT = ("ray", "gpu", "e2e")
"""No fault names a test of these. Ray's modules start threads."""
FEW = 3
"""For so many faults it is quicker to import and compile in each process what it needs."""


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


def warm_up() -> None:
    """Import all that the package and its tests import, but nothing of the repository."""
    for path in (*Path("manyroots").rglob("*.py"), *Path("tests").rglob("*.py")):
        if not set(ROOMS_LEFT_OUT) & set(path.parts):
            for statement in ast.parse(path.read_text()).body:
                _import_as(statement)
    loaded = [name for name in sys.modules if name.startswith("manyroots")]
    assert not loaded, f"too late to plant: {loaded}"
    gc.freeze()  # the garbage collector need not scan them in each process


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


def compile_all() -> None:
    by_text = PycInvalidationMode.CHECKED_HASH
    for folder in ("manyroots", "tests"):
        compileall.compile_dir(folder, quiet=1, force=True, invalidation_mode=by_text)


def outcomes(nodes: Iterable[str]) -> dict[str, str]:
    """How each of these tests ends in a process forked for them."""
    # A process that ends early, or with a fault, leaves files; they go with the folder.
    with (
        tempfile.TemporaryDirectory(prefix="mr-") as home,
        tempfile.NamedTemporaryFile("r") as told,
    ):
        child = os.fork()
        if not child:
            tempfile.tempdir = os.environ["TMPDIR"] = home
            _run_and_tell(sorted(set(nodes)), told.name)
        os.waitpid(child, 0)
        found: dict[str, str] = json.loads(told.read() or "{}")
        return found


def _run_and_tell(nodes: list[str], path: str) -> None:
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until this process ends
        told = _Outcomes(nodes)
        bare_pytest(*(f"tests/{node}" for node in nodes), plugins=[told, anyio.pytest_plugin])
        Path(path).write_text(json.dumps(told.found))
    finally:
        os._exit(0)


def tell(name: str | None, found: dict[str, str]) -> None:
    print(json.dumps({"fault": name, "ended": found}), flush=True)


def main() -> int:
    if Path(".git").exists():
        print(
            "this is a checkout, and a run that is ended would leave a fault in it; "
            "use `make faults`, which makes a copy.",
            file=sys.stderr,
        )
        return 2
    text = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [each for each in MUTATIONS if text in each.name and each.noticed_by]
    sys.dont_write_bytecode = True  # no compiled file of a planted fault may remain
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if len(chosen) > FEW:
        warm_up()
        compile_all()
    noticed = set()
    for mutation in chosen:
        path = Path("manyroots") / mutation.file
        whole = path.read_text()
        try:
            path.write_text(mutation.applied_to(whole))
        except LookupError:  # another test reports it; the other faults can be planted
            tell(mutation.name, {})
            continue
        ended = outcomes(mutation.noticed_by)
        tell(mutation.name, ended)
        noticed.update(case for case, how in ended.items() if how == "failed")
        path.write_text(whole)
    if text:
        tell(None, outcomes(noticed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
