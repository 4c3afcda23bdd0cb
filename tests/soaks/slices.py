"""Long runs over seeds: in slices, on several processes, with a file to go on from.

In: what one seed gives (counts, and what was wrong, if anything), and how much is enough. Out:
the totals over seeds that follow each other. A run that is ended, or asks for a limited time, goes
on where its state file says; a file of other code or other seeds is refused.

`python -m tests.soaks.slices FILE...` adds up the files of several machines, which began at other
seeds: a line for each soak and code, with the seeds that were run. A seed counts once.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

from manyroots.errors import ManyrootsError

SEEDS_PER_SLICE = 10
UNFINISHED = 2
"""Exit status where nothing was wrong and the time was over before it was enough."""

RunSeed = Callable[[int], tuple[dict[str, int], str | None]]
"""Counts of a seed's run, and what was wrong."""


@dataclass(slots=True)
class Slice:
    """A few seeds, run one after the other."""

    first_seed: int
    num_seeds: int
    counts: dict[str, int]
    failures: dict[int, str]
    cpu_s: float
    run: int = 0
    """Which start of the command this was."""
    at_s: float = 0.0
    """When it ended, since that start."""


@dataclass(slots=True)
class Tally:
    """What all slices so far come to."""

    first_seed: int
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    num_seeds: int = 0
    cpu_s: float = 0.0
    elapsed_s: dict[int, float] = field(default_factory=dict)
    """By start of the command."""

    def add(self, done: Slice) -> None:
        self.num_seeds += done.num_seeds
        self.counts += Counter(done.counts)
        self.failures |= {int(seed): text for seed, text in done.failures.items()}
        self.cpu_s += done.cpu_s
        self.elapsed_s[done.run] = max(self.elapsed_s.get(done.run, 0.0), done.at_s)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        starts = f" in {len(self.elapsed_s)} starts" if len(self.elapsed_s) > 1 else ""
        return (
            f"seeds {self.first_seed} to {self.first_seed + self.num_seeds - 1}: {counts}; "
            f"{len(self.failures)} failures; {sum(self.elapsed_s.values()):.0f} s{starts}, "
            f"{self.cpu_s:.0f} s of one core; code {code_digest()}"
        )


class SliceFile:
    """The file: a line that says what is run, then one for each slice that is done."""

    def __init__(
        self, path: Path | None, what: str, first_seed: int, num_seeds: int = SEEDS_PER_SLICE
    ) -> None:
        """`num_seeds`: of each slice."""
        self._path = path
        self.num_seeds = num_seeds
        self.done: dict[int, Slice] = {}
        header = {"what": what, "first_seed": first_seed, "code": code_digest()}
        if num_seeds != SEEDS_PER_SLICE:
            header["seeds_per_slice"] = num_seeds
        if path is None:
            return
        if not path.exists():
            path.write_text(json.dumps(header) + "\n")
            return
        first, *lines = path.read_text().splitlines()
        if json.loads(first) != header:
            raise ManyrootsError(
                f"{path} is of another run, {first}, and this one is {json.dumps(header)}; "
                "name another file with --state to begin anew"
            )
        for line in lines:
            try:
                done = Slice(**json.loads(line))
            except (ValueError, TypeError):
                continue  # the run was ended in the midst of this line; the slice is run again
            self.done[done.first_seed] = done

    @property
    def next_run(self) -> int:
        return 1 + max((done.run for done in self.done.values()), default=0)

    def add(self, done: Slice) -> None:
        self.done[done.first_seed] = done
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(done)) + "\n")


@cache
def code_digest() -> str:
    """Which code this is: a number of the sources that the soak has imported. Other rooms may
    change between two parts of one soak."""
    digest, ours = hashlib.sha256(), {"__main__", "manyroots", "tests"}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.partition(".")[0] in ours:
            digest.update(f"{name}\n".encode())
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:12]


def run_slices(
    run_seed: RunSeed,
    is_enough: Callable[[Tally], bool],
    *,
    first_seed: int,
    jobs: int = 1,
    state: SliceFile | None = None,
    limit_s: float | None = None,
) -> tuple[Tally, bool]:
    """Run seeds in order till it is enough, or till the time is over; gives the totals over all
    that the state has, and whether it was enough."""
    state = SliceFile(None, "", first_seed) if state is None else state
    tally, run, began = Tally(first_seed), state.next_run, time.monotonic()
    for done in state.done.values():
        tally.add(done)
    upto, num_seeds = max(state.done, default=first_seed), state.num_seeds
    # Seeds that follow each other: what an end by force left out comes first, enough or not.
    missed = deque(s for s in range(first_seed, upto, num_seeds) if s not in state.done)
    fresh = itertools.count(upto + num_seeds * bool(state.done), num_seeds)
    run_one = partial(run_slice, run_seed, num_seeds)

    def next_seed() -> int | None:
        if limit_s is not None and time.monotonic() - began > limit_s:
            return None
        if missed:
            return missed.popleft()
        return None if is_enough(tally) else next(fresh)

    def take(done: Slice) -> None:
        done.run, done.at_s = run, round(time.monotonic() - began, 1)
        state.add(done)
        tally.add(done)

    if jobs == 1:
        while (seed := next_seed()) is not None:
            take(run_one(seed))
    else:
        _run_on(jobs, run_one, next_seed, take)
    return tally, is_enough(tally) and not missed


def _run_on(
    jobs: int,
    run_one: Callable[[int], Slice],
    next_seed: Callable[[], int | None],
    take: Callable[[Slice], None],
) -> None:
    # Fresh processes: a fork would carry over the threads and locks of the caller.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        under_way: set[Future[Slice]] = set()
        while True:
            while len(under_way) <= jobs and (seed := next_seed()) is not None:
                under_way.add(pool.submit(run_one, seed))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for each in done:
                take(each.result())


def run_slice(run_seed: RunSeed, num_seeds: int, first_seed: int) -> Slice:
    began, counts = time.process_time(), Counter[str]()
    failures: dict[int, str] = {}
    for seed in range(first_seed, first_seed + num_seeds):
        found, failure = run_seed(seed)
        counts.update(found)
        if failure is not None:
            failures[seed] = failure
    cpu_s = round(time.process_time() - began, 3)
    return Slice(first_seed, num_seeds, dict(counts), failures, cpu_s)


def command(
    what: str,
    run_seed: RunSeed,
    amount: str,
    *,
    description: str | None,
    argv: list[str] | None,
    seeds_per_slice: int = SEEDS_PER_SLICE,
) -> int:
    """The command line of a long run that goes on till the count called `amount` is reached.

    `seeds_per_slice`: more where a seed takes milliseconds, or handing out slices takes longer.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {what}", description=description)
    parser.add_argument(f"--{amount}", type=int, required=True, metavar="N", help="at least")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first one")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--state", type=Path, metavar="FILE", help="goes on from what it says")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--limit-s", type=float, metavar="S", help="begin nothing after this time")
    limit.add_argument("--minutes", type=float, metavar="M", help="the same, in minutes")
    given = parser.parse_args(argv)
    limit_s = given.limit_s if given.minutes is None else 60 * given.minutes
    wanted: int = getattr(given, amount)
    tally, is_done = run_slices(
        run_seed,
        lambda tally: tally.counts[amount] >= wanted,
        first_seed=given.seed,
        jobs=given.jobs,
        state=SliceFile(given.state, what, given.seed, seeds_per_slice),
        limit_s=limit_s,
    )
    print(f"{what}: {tally}")
    for seed, failure in sorted(tally.failures.items()):
        print(f"seed {seed}: {failure}", file=sys.stderr)
    if not is_done:
        again = "the same command goes on" if given.state else "--state FILE would let it go on"
        print(f"{tally.counts[amount]} of {wanted} {amount}; {again}", file=sys.stderr)
    return 1 if tally.failures else 0 if is_done else UNFINISHED


@dataclass(slots=True)
class Sum:
    """What the files of one soak and one code come to."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    seeds: set[int] = field(default_factory=set)
    cpu_s: float = 0.0

    def add(self, done: Slice) -> None:
        seeds = range(done.first_seed, done.first_seed + done.num_seeds)
        if not self.seeds.isdisjoint(seeds):
            if self.seeds.issuperset(seeds):
                return  # another file has them, too
            raise ManyrootsError(f"slices of other lengths share seeds from {seeds.start} on")
        self.seeds.update(seeds)
        self.counts.update(done.counts)
        self.failures |= {int(seed): text for seed, text in done.failures.items()}
        self.cpu_s += done.cpu_s

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return (
            f"seeds {_runs(sorted(self.seeds))}: {counts}; {len(self.failures)} failures; "
            f"{self.cpu_s:.0f} s of one core"
        )


def _runs(seeds: list[int]) -> str:
    """Ascending numbers as ranges."""
    begins = [s for i, s in enumerate(seeds) if not i or seeds[i - 1] != s - 1]
    ends = [s for i, s in enumerate(seeds) if i + 1 == len(seeds) or seeds[i + 1] != s + 1]
    return ", ".join(f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True))


def add_up(paths: list[Path]) -> dict[tuple[str, str], Sum]:
    """By soak and code."""
    sums: dict[tuple[str, str], Sum] = {}
    for path in paths:
        first, *lines = path.read_text().splitlines()
        header = json.loads(first)
        total = sums.setdefault((header["what"], header["code"]), Sum())
        for line in lines:
            try:
                done = Slice(**json.loads(line))
            except (ValueError, TypeError):
                continue  # see `SliceFile`
            total.add(done)
    return sums


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soaks.slices", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    sums = add_up(parser.parse_args(argv).files)
    for (what, code), total in sorted(sums.items()):
        print(f"{what}, code {code}: {total}")
        for seed, failure in sorted(total.failures.items()):
            print(f"{what} seed {seed}: {failure}", file=sys.stderr)
    return int(any(total.failures for total in sums.values()))


if __name__ == "__main__":
    sys.exit(main())
