"""A rank without a model: its steps are one sum and one join over all ranks.

Run as a program it is a rank other than the first. The step's number says what goes wrong.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from manyroots.distributed import follower
from manyroots.distributed.group import join_group, leave_group
from manyroots.distributed.shard import Shard
from manyroots.distributed.wire import Join, StartSteps
from manyroots.errors import ModelError
from manyroots.ids import StepId
from manyroots.step import (
    AdapterLoaded,
    Copy,
    CopyDone,
    DropAdapter,
    LoadAdapter,
    Plan,
    StepResult,
)

RAISES_ON_FIRST = StepId(1000)
RAISES_ON_LAST = StepId(1001)
DIES_ON_LAST = StepId(1002)
HANGS_ON_LAST = StepId(1003)


def plan(
    step_id: int, *, adapters: tuple[LoadAdapter, ...] = (), copies: tuple[Copy, ...] = ()
) -> Plan:
    none, no_samples = np.empty(0, np.int32), np.empty(0, np.bool_)
    return Plan(StepId(step_id), (), (), none, none, no_samples, copies=copies, adapters=adapters)


def compute(step_id: StepId, shard: Shard) -> list[int]:
    """(sum of ranks + 1) * step_id; then 0..4, of which each rank brings its part."""
    is_last = shard.rank == shard.size - 1
    if (step_id == RAISES_ON_LAST and is_last) or (step_id == RAISES_ON_FIRST and shard.is_first):
        raise RuntimeError("planted fault")
    if step_id == DIES_ON_LAST and is_last:
        os._exit(7)
    if step_id == HANGS_ON_LAST and is_last:
        time.sleep(600)
    total = shard.add_up(torch.tensor([(shard.rank + 1) * float(step_id)]))
    part = shard.part(5)
    columns = shard.join(torch.arange(part.start, part.stop).float(), 5)
    own = torch.tensor([42 if shard.is_first else 0], dtype=torch.int32)
    return [int(total), *columns.int().tolist(), *shard.agree(own).tolist()]


class FirstRank:
    """A `Runner` for the first rank."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._thread = ThreadPoolExecutor(1)

    def launch(self, plan: Plan) -> Future[StepResult]:
        return self._thread.submit(self._execute, plan)

    def close(self) -> None:
        self._thread.shutdown()

    def _execute(self, plan: Plan) -> StepResult:
        return StepResult(plan.step_id, np.array(compute(plan.step_id, self._shard), np.int32))


@dataclass
class Steps:
    shard: Shard
    tell: follower.Tell
    forgotten: int = 0
    """How many pages it was told to remove."""

    def execute(self, plan: Plan) -> object:
        for intent in plan.adapters:
            if isinstance(intent, LoadAdapter):
                self.tell(AdapterLoaded(intent.load_id, f"told by rank {self.shard.rank}"))
        for copy in plan.copies:
            arrived = np.arange(len(copy.target_units)) != self.shard.rank
            self.tell(CopyDone(copy.copy_id, arrived, seconds=float(self.forgotten)))
        return compute(plan.step_id, self.shard)

    def forget(self, hashes: Sequence[bytes]) -> None:
        self.forgotten += len(hashes)

    def drop(self, intent: DropAdapter) -> None:
        raise NotImplementedError(f"no test drops {intent}")

    def close(self) -> None:
        leave_group()


@dataclass
class Part:
    shard: Shard
    folder: Path

    @property
    def num_pages(self) -> int:
        return 100 - self.shard.rank

    @property
    def adapter_room(self) -> int:
        return 9 - self.shard.rank

    def start(self, start: StartSteps, tell: follower.Tell) -> Steps:
        assert start.num_units == (100 - (self.shard.size - 1), 30)
        assert start.adapter_room == min(7, 9 - (self.shard.size - 1))
        join_group(self.shard, self.folder, device_type="cpu")
        return Steps(self.shard, tell)


def build(join: Join) -> Part:
    if join.settings.model.model == "unloadable":
        raise ModelError("planted: no such weights")
    if join.settings.model.model == "crashing":
        os._exit(3)
    return Part(Shard(join.rank, join.size), Path(join.folder))


if __name__ == "__main__":
    sys.exit(follower.main(build))
