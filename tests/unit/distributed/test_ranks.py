"""Real processes that meet through gloo: they stay in step, and a death is told at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from manyroots.config import engine_settings
from manyroots.distributed.group import join_group, leave_group
from manyroots.distributed.ranks import Ranks
from manyroots.distributed.runner import RankedRunner
from manyroots.distributed.shard import Shard
from manyroots.distributed.wire import RankMessageKind, StartSteps
from manyroots.errors import ModelError, UnavailableError
from manyroots.ids import AdapterDigest, AdapterSlot, CopyId, StepId, Tier
from manyroots.step import AdapterLoaded, Copy, CopyDone, LoadAdapter, LoadId, SlotRef
from tests.helpers.patience import PATIENCE_S
from tests.unit.distributed import fake_rank

COMMAND = (sys.executable, str(fake_rank.__file__))
AT_ONCE_S = 45.0
"""Far below the collectives' own timeout, far above what a busy machine needs."""


class Ranked:
    """A runner over `size` ranks, and what it said."""

    def __init__(self, size: int) -> None:
        self.deaths: list[str] = []
        self.died = threading.Event()
        self.answers: list[tuple[int, AdapterLoaded | CopyDone]] = []
        shard = Shard(0, size)
        self.ranks = Ranks(size, engine_settings({"model": "fake"}), command=COMMAND)
        fits = self.ranks.wait_until_loaded()
        start = StartSteps((min(100, fits.num_pages), 30), min(7, fits.adapter_room), 64)
        self.ranks.send(RankMessageKind.START, start)
        join_group(shard, self.ranks.folder, device_type="cpu")
        self.runner = RankedRunner(
            fake_rank.FirstRank(shard),
            self.ranks,
            on_adapter=lambda rank, answer: self.answers.append((rank, answer)),
            on_copy=lambda rank, answer: self.answers.append((rank, answer)),
            on_death=self._die,
            leave=leave_group,
        )

    def _die(self, reason: str) -> None:
        self.deaths.append(reason)
        self.died.set()

    def tokens(self, step_id: int) -> list[int]:
        return self.runner.launch(fake_rank.plan(step_id)).result(PATIENCE_S).tokens.tolist()


@contextmanager
def ranked(size: int) -> Iterator[Ranked]:
    made = Ranked(size)
    try:
        yield made
    finally:
        made.runner.close()
    for pid in made.ranks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not made.ranks.folder.exists()


def test_w16_t15_two_other_ranks_follow_and_answer() -> None:
    """W16: what three ranks sum or join is what one rank would have. What others load is told with
    their number. T15: every rank gets the copies of a plan and tells how they ended, and each is
    told which stored pages to remove, before any later plan."""
    none, units = np.empty(0, np.int32), np.arange(3, dtype=np.int32)
    with ranked(3) as it:
        check_sums(it, 3)
        target = SlotRef(AdapterSlot(0), 1)
        load = LoadAdapter(LoadId(4), AdapterDigest(b"d"), Tier.STORAGE, target, "/a", 8)
        it.runner.launch(fake_rank.plan(6, adapters=(load,))).result(PATIENCE_S)
        wait_for_answers(it, 2)
        it.ranks.send(RankMessageKind.FORGET, (b"one page", b"another"))
        copy = Copy(CopyId(9), 1, Tier.STORAGE, Tier.HOST, none, units, (b"a", b"b", b"c"))
        it.runner.launch(fake_rank.plan(7, copies=(copy,))).result(PATIENCE_S)
        wait_for_answers(it, 4)
    assert it.deaths == []
    assert sorted(rank for rank, _ in it.answers[:2]) == [1, 2]
    for _, answer in it.answers[:2]:
        assert isinstance(answer, AdapterLoaded)
        assert answer.load_id == LoadId(4)
    by_rank = dict(it.answers[2:])
    for rank in (1, 2):
        answer = by_rank[rank]
        assert isinstance(answer, CopyDone)
        assert (answer.copy_id, answer.error, answer.seconds) == (CopyId(9), None, 2.0)
        assert answer.arrived.tolist() == [True, rank != 1, rank != 2]


def check_sums(it: Ranked, size: int) -> None:
    futures = [it.runner.launch(fake_rank.plan(step)) for step in range(1, 6)]
    for step, future in enumerate(futures, start=1):
        total = step * size * (size + 1) // 2
        assert future.result(PATIENCE_S).tokens.tolist() == [total, 0, 1, 2, 3, 4, 42]


def wait_for_answers(it: Ranked, count: int) -> None:
    """Answers that are on their way at the close are lost."""
    deadline = time.monotonic() + PATIENCE_S
    while len(it.answers) < count:
        assert time.monotonic() < deadline, it.answers
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("step_id", "reason"),
    [
        (fake_rank.DIES_ON_LAST, "rank 1 .* ended with code 7"),
        (fake_rank.RAISES_ON_LAST, "rank 1 .* planted fault"),
        (fake_rank.RAISES_ON_FIRST, "rank 0 failed: planted fault"),
    ],
)
def test_r04_a_rank_that_fails_in_a_step_fails_every_step_under_way(
    step_id: StepId, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R04: a rank's crash fails its requests with the reason instead of hanging the others."""
    if step_id != fake_rank.RAISES_ON_FIRST:  # the other one's end takes its time
        monkeypatch.setattr("manyroots.distributed.runner.BLAME_WAIT_S", AT_ONCE_S)
    with ranked(2) as it:
        assert it.tokens(1)[0] == 3
        began = time.monotonic()
        futures = [it.runner.launch(fake_rank.plan(step)) for step in (step_id, 2)]
        for future in futures:
            with pytest.raises(UnavailableError, match=reason):
                future.result(AT_ONCE_S)
        assert time.monotonic() - began < AT_ONCE_S
        assert it.died.wait(AT_ONCE_S)
        with pytest.raises(UnavailableError, match="rank"):
            it.runner.launch(fake_rank.plan(3))
    assert len(it.deaths) == 1


def test_r04_w16_an_idle_ranks_death_is_told_at_once() -> None:
    """R04: readiness must not wait for the next request to notice a dead rank. W16: before that,
    two ranks have summed and joined."""
    with ranked(2) as it:
        check_sums(it, 2)
        os.kill(it.ranks.pids[0], signal.SIGKILL)
        assert it.died.wait(AT_ONCE_S)
    assert "killed by signal 9" in it.deaths[0]


def test_r04_a_rank_killed_while_it_hangs_frees_the_first() -> None:
    """R04: whatever the first rank waits for inside a step ends with the other's process."""
    with ranked(2) as it:
        future = it.runner.launch(fake_rank.plan(fake_rank.HANGS_ON_LAST))
        with pytest.raises(TimeoutError):
            future.result(0.5)
        os.kill(it.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(UnavailableError, match="killed by signal 9"):
            future.result(AT_ONCE_S)


@pytest.mark.parametrize(
    ("model", "reason"), [("unloadable", "rank 1: planted: no such"), ("crashing", "code 3")]
)
def test_a_rank_that_cannot_load_says_why(model: str, reason: str) -> None:
    ranks = Ranks(2, engine_settings({"model": model}), command=COMMAND)
    try:
        with pytest.raises(ModelError, match=reason):
            ranks.wait_until_loaded()
    finally:
        ranks.close()


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """They also remove the folder in which they met: no other process is left to do it."""
    code = """
import os
from tests.unit.distributed.test_ranks import Ranked
print(Ranked(2).ranks.pids[0], flush=True)
os._exit(0)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_S,
        cwd=root,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    pid = int(done.stdout)
    deadline = time.monotonic() + AT_ONCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"rank {pid} outlives its parent"
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
