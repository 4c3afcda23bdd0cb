"""A rank of the engine other than the first: `python -m manyroots.engine.rank_process`.

Started by `distributed/ranks.py` with its channel as standard input. Loads its part of the model,
then executes the first rank's plans. Connects parts that `distributed` must not know.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from manyroots.config import EngineSettings
from manyroots.distributed import follower
from manyroots.distributed.group import join_group, leave_group
from manyroots.distributed.shard import Shard
from manyroots.distributed.wire import Join, StartSteps
from manyroots.engine.adapter_runtime import AdapterRuntime
from manyroots.engine.memory import Sizes
from manyroots.engine.worker import Worker, load_worker
from manyroots.models.source import resolve_source
from manyroots.runner.runner import ModelRunner
from manyroots.step import DropAdapter, Plan
from manyroots.store.adapter_ranks import FollowingLoader
from manyroots.store.copy_ends import ForwardedEnds


@dataclass(frozen=True, slots=True)
class _Steps:
    runner: ModelRunner
    adapters: AdapterRuntime | None

    def execute(self, plan: Plan) -> object:
        return self.runner.execute(plan)

    def drop(self, intent: DropAdapter) -> None:
        if self.adapters is None:
            raise RuntimeError(f"this rank has no adapters, and is told {intent}")
        self.adapters.loader.start([intent])

    def forget(self, hashes: Sequence[bytes]) -> None:
        self.runner.forget_stored(hashes)

    def close(self) -> None:
        self.runner.close()
        leave_group()


@dataclass(frozen=True, slots=True)
class _Part:
    loaded: Worker
    settings: EngineSettings
    folder: Path

    @property
    def num_pages(self) -> int:
        return self.loaded.num_pages

    @property
    def adapter_room(self) -> int:
        return self.loaded.adapter_room

    def start(self, start: StartSteps, tell: follower.Tell) -> _Steps:
        loaded = self.loaded
        sizes = Sizes(start.num_units, start.adapter_room, start.max_model_len)
        adapters = loaded.make_adapters(self.settings, sizes, partial(FollowingLoader, tell=tell))
        model = loaded.model
        join_group(model.shard, self.folder, device_type=model.device.type)
        runner = loaded.make_runner(self.settings, sizes, adapters, ends=ForwardedEnds(tell))
        return _Steps(runner, adapters)


def build(join: Join) -> _Part:
    logging.basicConfig(
        level=os.environ.get("MANYROOTS_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s rank {join.rank} %(levelname)s %(message)s",
    )
    shard = Shard(join.rank, join.size)
    loaded = load_worker(join.settings, resolve_source(join.settings.model), shard)
    return _Part(loaded, join.settings, Path(join.folder))


if __name__ == "__main__":
    code = follower.main(build)
    sys.stderr.flush()
    # After a failure, threads may hang between the ranks; nothing here needs an orderly exit.
    os._exit(code)
