"""Fast tests of the decide half with a fault planted, ended by the first that fails.

`python -m tests.helpers.detector --jobs N [TEXT]` plants each fault that names no tests of its own
(with a text, those whose name has it). Each runs in a process forked from this one, so that common
imports happen once. A fault is planted as its module is imported; no file changes. Prints a line
for each: what noticed it, or nothing. In the end the checks that noticed a fault run without any.

`noticed_once.json` records what noticed a fault once. That check runs first; if it no longer
notices the fault, all checks run. `--remember` writes the file anew.

A fault may keep the tests from ending. A limit on processor time then ends them, which does not
depend on the machine's load.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.abc
import importlib.util
import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

import numpy  # noqa: F401  before forking
import pytest

from tests.helpers.mutations import MUTATIONS, Mutation

PACKAGE = Path(__file__).parents[2] / "manyroots"
UNIT_TESTS = ("tests/unit/cache", "tests/unit/scheduler")
NEAR = {
    "cache/checkpoints.py": ["cache/test_families.py"],
    "cache/costs.py": ["cache/test_costs.py"],
    "cache/growth.py": ["cache/test_families.py", "cache/test_drafts.py"],
    "cache/index.py": ["cache/test_tiers.py"],
    "cache/keeping.py": ["scheduler/test_storage_bursts.py", "cache/test_tiers.py"],
    "cache/keys.py": ["cache/test_namespaces.py"],
    "cache/onboarding.py": ["cache/test_tiers.py", "scheduler/test_reuse.py"],
    "cache/prefetch.py": [
        "cache/test_tiers.py",
        "scheduler/test_reuse.py",
        "scheduler/test_storage_bursts.py",
    ],
    "cache/publishing.py": ["cache/test_cache.py", "cache/test_drafts.py"],
    "cache/sole.py": ["cache/test_cache.py", "cache/test_namespaces.py"],
    "cache/states.py": ["cache/test_families.py"],
    "cache/storage_health.py": ["cache/test_storage_health.py"],
    "cache/transfers.py": ["cache/test_tiers.py"],
    "cache/tree.py": ["cache/test_tree.py", "cache/test_reasons.py"],
    "cache/writeback.py": ["cache/test_tiers.py"],
    "scheduler/admission.py": ["scheduler"],
    "scheduler/fetches.py": ["scheduler/test_storage_bursts.py", "scheduler/test_reuse.py"],
    "scheduler/lanes.py": ["scheduler/test_queue.py", "scheduler/test_fair.py"],
    "scheduler/results.py": ["scheduler"],
    "scheduler/rows.py": ["scheduler"],
    "scheduler/scheduler.py": ["scheduler"],
    "scheduler/slices.py": ["scheduler/test_adapters.py", "scheduler/test_slices.py"],
    "scheduler/victims.py": ["scheduler"],
}
"""Tests to run first, because they are likely to notice the fault; all run in the end."""
LEFT_OUT = ("tests/unit/scheduler/test_hash_seeds.py",)
"""Tests that start processes of their own, in which no fault would be planted."""
PLUGINS_LEFT_OUT = ("cacheprovider", "unraisableexception")
"""Not needed, and slow to start or end."""
NUM_SEEDS = 24
NUM_QUICK = 6
"""This many seeds run before the unit tests: they notice most faults soonest."""
MOST_STEPS = 1000
"""A request that a fault keeps waiting for ever is given up sooner here."""
CPU_LIMIT_S = 120
"""Several times the time of all checks without a fault."""
HINTS = Path(__file__).parent / "noticed_once.json"
SEED = "seed "
NEVER_ENDS = "it never ends"


class _Planted(SourceFileLoader):
    """Loads a module with a fault in it, never from a file compiled without it."""

    mutation: Mutation

    def get_code(self, fullname: str) -> CodeType:
        text = self.mutation.applied_to(Path(self.path).read_text())
        return compile(text, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation
        self.found = False

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self.mutation.module:
            return None
        self.found = True
        loader = _Planted(name, str(PACKAGE / self.mutation.file))
        loader.mutation = self.mutation
        return importlib.util.spec_from_loader(name, loader)


def detect(mutation: Mutation) -> str | None:
    """What noticed the fault, if anything: a seed, or a test."""
    assert not any(name.startswith("manyroots") for name in sys.modules), "too late to plant"
    finder = _Finder(mutation)
    sys.meta_path.insert(0, finder)
    # The tests nearest to a fault are the likeliest to notice it.
    near = [f"tests/unit/{name}" for name in NEAR.get(mutation.file, [])]
    try:
        noticed = (
            try_again(hints().get(mutation.name))
            or try_seeds(range(NUM_QUICK))
            # By themselves: of paths that overlap, pytest takes the folder's order.
            or (try_unit_tests(near) if near else None)
            or try_unit_tests(list(UNIT_TESTS))
            or try_seeds(range(NUM_QUICK, NUM_SEEDS))
        )
    except ImportError as error:
        noticed = f"{error}"
    assert finder.found, "no test imports the module with the fault"
    return noticed


def hints() -> dict[str, str]:
    """By fault: what noticed it once."""
    found: dict[str, str] = json.loads(HINTS.read_text())
    return found


def try_again(check: str | None) -> str | None:
    """Run what noticed the fault once: it mostly does so again. A check that no longer exists is
    ignored."""
    if check is None:
        return None
    if check.startswith(SEED):
        return try_seeds([int(check.removeprefix(SEED))])
    failures = _Failures()
    code = run_unit_tests([check], failures)
    return failures.first if code == pytest.ExitCode.TESTS_FAILED else None


def detect_nothing(checks: list[str]) -> str | None:
    """The checks that noticed a fault and also fail without one."""
    seeds = sorted({int(each.removeprefix(SEED)) for each in checks if each.startswith(SEED)})
    tests = sorted({each for each in checks if each.startswith("tests/")})
    return try_seeds(seeds) or (try_unit_tests(tests) if tests else None)


def try_seeds(seeds: Iterable[int]) -> str | None:
    from tests.helpers.scheduler_harness import SchedulerHarness
    from tests.property.cache_oracle import Walk
    from tests.property.test_families_and_tiers import run

    SchedulerHarness.run.__defaults__ = (MOST_STEPS,)
    for seed in seeds:
        try:
            Walk.of(seed, 120).run()
            run(seed, num_requests=12)
        except Exception:
            return f"{SEED}{seed}"
    return None


def try_unit_tests(paths: list[str]) -> str | None:
    failures = _Failures()
    return None if run_unit_tests(paths, failures) == 0 else failures.first


def bare_pytest(*arguments: str, plugins: list[object]) -> int:
    """pytest without what is not needed here: each fault starts it anew."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    without = [part for name in PLUGINS_LEFT_OUT for part in ("-p", f"no:{name}")]
    return pytest.main(
        ["-q", "--no-header", "--tb=no", "--assert=plain", *without, *arguments], plugins=plugins
    )


def run_unit_tests(paths: list[str], failures: _Failures) -> int:
    ignored = [f"--ignore={path}" for path in LEFT_OUT]
    return bare_pytest("-x", *ignored, *paths, plugins=[failures])


class _Failures:
    """Remembers the first test that fails."""

    first = "a unit test"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.first = report.nodeid


class Apart:
    """A detection in a process that is forked for it."""

    def __init__(self, name: str, look: Callable[[], str | None]) -> None:
        self.name = name
        self._answer, answer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._look(look, answer)
        os.close(answer)

    def _look(self, look: Callable[[], str | None], answer: int) -> None:
        status = 1
        try:
            logging.disable()
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                noticed = look()
            os.write(answer, (noticed or "").encode())
            status = 0
        finally:
            os._exit(status)

    def noticed(self, status: int) -> str | None:
        """Once it has ended so: what was noticed."""
        with open(self._answer, "rb") as answer:
            text = answer.read().decode()
        if os.WIFSIGNALED(status):
            return NEVER_ENDS
        assert os.waitstatus_to_exitcode(status) == 0, f"the detector itself failed: {self.name}"
        return text or None


def detect_all(mutations: list[Mutation], jobs: int) -> Iterator[tuple[str, str | None]]:
    """By fault, in any order: its name, and what noticed it."""
    waiting, under_way = mutations[::-1], {}
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            mutation = waiting.pop()
            apart = Apart(mutation.name, functools.partial(detect, mutation))
            under_way[apart.pid] = apart
        child, status, used = os.wait3(0)
        apart = under_way.pop(child)
        noticed = apart.noticed(status)
        print(f"{apart.name} | {noticed} | {used.ru_utime + used.ru_stime:.1f} s", flush=True)
        yield apart.name, noticed


def check_without_faults(noticed: Iterable[str | None]) -> None:
    """A check that noticed a fault must pass without it; otherwise it shows nothing."""
    checks = [each for each in noticed if each is not None]
    if NEVER_ENDS in checks:
        checks += [*UNIT_TESTS, *(f"{SEED}{seed}" for seed in range(NUM_SEEDS))]
    apart = Apart("no fault", functools.partial(detect_nothing, checks))
    failed = apart.noticed(os.waitpid(apart.pid, 0)[1])
    assert failed is None, f"something is noticed without any fault: {failed}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.detector", description=__doc__)
    parser.add_argument("text", nargs="?", default="", help="in the names of those to plant")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--remember", action="store_true", help="what notices which, for next time")
    given = parser.parse_args()
    chosen = [m for m in MUTATIONS if given.text in m.name and not m.noticed_by]
    gc.freeze()  # the garbage collector need not scan earlier imports in each fork
    outcomes = dict(detect_all(chosen, given.jobs))
    check_without_faults(outcomes.values())
    if given.remember:
        known = hints() | {name: check for name, check in outcomes.items() if check}
        names = {mutation.name for mutation in MUTATIONS if not mutation.noticed_by}
        kept = {name: known[name] for name in sorted(known.keys() & names)}
        HINTS.write_text(json.dumps(kept, indent=1) + "\n")
    missed = [name for name, check in outcomes.items() if check is None]
    print(f"{len(missed)} of {len(outcomes)} faults were not noticed: {missed}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
