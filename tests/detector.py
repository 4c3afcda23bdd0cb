"""Fast tests of the decide half with a fault planted, ended by the first that fails.

`python -m tests.detector --jobs N [TEXT]` plants each fault that names no tests of its own (those
whose name has the text), and the absence of any, each in a process of its own that is forked from
this one: what every one of them imports is imported once. A fault is planted as its module is
imported; no file changes. One line for each: what was noticed, or nothing.

A fault may keep the tests from ending. What ends them then is a limit on processor time, which
does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.util
import logging
import os
import resource
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

import numpy  # noqa: F401  before forking
import pytest

from tests.mutations import MUTATIONS, Mutation

PACKAGE = Path(__file__).parents[1] / "manyroots"
UNIT_TESTS = ("tests/unit/cache", "tests/unit/scheduler")
NEAR = {
    "cache/checkpoints.py": ["cache/test_families.py"],
    "cache/costs.py": ["cache/test_costs.py"],
    "cache/growth.py": ["cache/test_families.py", "cache/test_drafts.py"],
    "cache/index.py": ["cache/test_tiers.py"],
    "cache/keys.py": ["cache/test_namespaces.py"],
    "cache/prefetch.py": ["cache/test_tiers.py"],
    "cache/publishing.py": ["cache/test_cache.py", "cache/test_drafts.py"],
    "cache/states.py": ["cache/test_families.py"],
    "cache/storage.py": ["cache/test_storage.py"],
    "cache/transfers.py": ["cache/test_tiers.py"],
    "cache/tree.py": ["cache/test_tree.py", "cache/test_reasons.py"],
    "cache/writeback.py": ["cache/test_tiers.py"],
    "scheduler/admission.py": ["scheduler"],
    "scheduler/lanes.py": ["scheduler/test_queue.py", "scheduler/test_fair.py"],
    "scheduler/rows.py": ["scheduler"],
    "scheduler/scheduler.py": ["scheduler"],
    "scheduler/turns.py": ["scheduler/test_adapters.py"],
    "scheduler/victims.py": ["scheduler"],
}
"""Where to look first, to be done sooner; all are looked at in the end."""
LEFT_OUT = ("tests/unit/scheduler/test_hash_seeds.py",)
"""Tests that start processes of their own, in which nothing would be planted."""
NUM_SEEDS = 24
NUM_QUICK = 6
"""So many seeds come before the unit tests: they notice most faults soonest."""
MOST_STEPS = 1000
"""A request that a fault keeps waiting for ever is given up sooner here."""
CPU_LIMIT_S = 120
"""Several times what all of it takes where nothing is wrong."""


class _Planted(SourceFileLoader):
    """Loads a module with a fault in it, and never from what was compiled without."""

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


def detect(mutation: Mutation | None) -> str | None:
    """What was noticed, if anything."""
    finder = None
    if mutation is not None:
        assert not any(name.startswith("manyroots") for name in sys.modules), "too late to plant"
        finder = _Finder(mutation)
        sys.meta_path.insert(0, finder)
    # The tests nearest to a fault are the likeliest to notice it.
    near = [] if mutation is None else NEAR.get(mutation.file, [])
    paths = [f"tests/unit/{name}" for name in near] + list(UNIT_TESTS)
    try:
        noticed = (
            try_seeds(0, NUM_QUICK) or try_unit_tests(paths) or try_seeds(NUM_QUICK, NUM_SEEDS)
        )
    except ImportError as error:
        noticed = f"{error}"
    assert finder is None or finder.found, "nobody imports what the fault is in"
    return noticed


def try_seeds(first: int, end: int) -> str | None:
    from tests.deciding import Deciding
    from tests.property.cache_oracle import Walk
    from tests.property.test_families_and_tiers import run

    Deciding.run.__defaults__ = (MOST_STEPS,)
    for seed in range(first, end):
        try:
            Walk.of(seed, 120).run()
            run(seed, num_requests=12)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


def try_unit_tests(paths: list[str]) -> str | None:
    options = ["-x", "-q", "--no-header", "--assert=plain", "-p", "no:cacheprovider"]
    ignored = [f"--ignore={path}" for path in LEFT_OUT]
    return None if pytest.main([*options, *ignored, *paths]) == 0 else "a unit test"


def detect_apart(mutation: Mutation | None) -> int:
    """Fork a process that detects; gives its id. It exits with 1 if something was noticed."""
    child = os.fork()
    if child:
        return child
    status = 2
    try:
        logging.disable()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            noticed = detect(mutation)
        print(f"{name_of(mutation)} | {noticed}", flush=True)
        status = int(noticed is not None)
    finally:
        os._exit(status)


def detect_all(mutations: list[Mutation | None], jobs: int) -> Iterator[tuple[str, bool]]:
    """By fault, in any order: its name, and whether it was noticed."""
    waiting, under_way = mutations[::-1], {}
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            mutation = waiting.pop()
            under_way[detect_apart(mutation)] = mutation
        child, status = os.wait()
        name = name_of(under_way.pop(child))
        if os.WIFSIGNALED(status):
            print(f"{name} | it never ends", flush=True)
            yield name, True
        else:
            code = os.waitstatus_to_exitcode(status)
            assert code in (0, 1), f"the detector itself failed: {name}"
            yield name, bool(code)


def name_of(mutation: Mutation | None) -> str:
    return "no fault" if mutation is None else mutation.name


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.detector", description=__doc__)
    parser.add_argument("text", nargs="?", default="", help="in the names of those to plant")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    given = parser.parse_args()
    chosen = [m for m in MUTATIONS if given.text in m.name and not m.noticed_by]
    outcomes = dict(detect_all([None, *chosen], given.jobs))
    assert not outcomes.pop("no fault"), "something is noticed without any fault"
    missed = [name for name, is_noticed in outcomes.items() if not is_noticed]
    print(f"{len(missed)} of {len(outcomes)} faults were not noticed: {missed}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
