"""The first rank's side of an engine with several ranks: starts the others and loads beside them.

Gives a `Runner` in which all ranks execute the same plans. Imported only if there is more than one
rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from manyroots.config import EngineSettings
from manyroots.distributed.group import join_group, leave_group
from manyroots.distributed.ranks import Ranks
from manyroots.distributed.runner import RankedRunner
from manyroots.distributed.shard import Shard
from manyroots.distributed.wire import RankMessageKind, StartSteps
from manyroots.engine.adapter_runtime import AdapterRuntime
from manyroots.engine.loop import Alarm
from manyroots.engine.worker import Executor, load_worker, make_grammars
from manyroots.models.load import describe
from manyroots.models.sharding import cut_adapter, rank_spec
from manyroots.models.source import ModelSource
from manyroots.process.progress import stage
from manyroots.step import AdapterLoaded
from manyroots.store.adapter_ranks import FirstLoader
from manyroots.store.copy_ends import CollectedEnds

logger = logging.getLogger(__name__)


def execute_with_ranks(settings: EngineSettings, source: ModelSource) -> Executor:
    """The model's parts in as many processes; this one has the first part."""
    shard = Shard(0, settings.model.tensor_parallel_size)
    rank_spec(describe(source), shard)  # refuse what can't be divided before anything is started
    with _other_ranks(settings, source) as ranks:
        with stage("weights and sizes"):
            worker = load_worker(settings, source, shard)
        with stage("other ranks"):
            elsewhere = ranks.wait_until_loaded()
            num_pages = min(worker.num_pages, elsewhere.num_pages)
            adapter_room = min(worker.adapter_room, elsewhere.adapter_room)
            sizes = worker.memory.fit(num_pages, adapter_room, worker.max_model_len)
        start = StartSteps(sizes.num_units, sizes.adapter_room, sizes.max_model_len)
        ranks.send(RankMessageKind.START, start)
        make_loader = partial(
            FirstLoader,
            num_ranks=shard.size,
            cut=partial(cut_adapter, shard=shard, targets=worker.model.adapter_targets()),
            drop_elsewhere=partial(ranks.send, RankMessageKind.DROP),
        )
        adapters = worker.make_adapters(settings, sizes, make_loader)
        with stage("meeting of ranks"):
            join_group(shard, ranks.folder, device_type=worker.model.device.type)
        with stage("pages and warm-up"):
            grammars = make_grammars(settings, source, worker)
            ends = CollectedEnds(shard.size)
            own = worker.make_runner(settings, sizes, adapters, grammars, ends)
        logger.info("%d ranks; the others are processes %s", shard.size, ranks.pids)
        alarm = Alarm()
        runner = RankedRunner(
            own,
            ranks,
            on_adapter=_ear(adapters),
            on_copy=ends.hear,
            on_death=alarm.ring,
            leave=leave_group,
        )

        def forget(hashes: Sequence[bytes]) -> None:
            # The others first: each removes its parts before it writes any of a later plan.
            ranks.send(RankMessageKind.FORGET, tuple(hashes))
            own.forget_stored(hashes)

        return Executor(worker, num_pages, sizes, runner, adapters, grammars, forget, alarm)


def _ear(adapters: AdapterRuntime | None) -> Callable[[int, AdapterLoaded], None]:
    """Receives the ends of other ranks' loads."""
    if adapters is None:
        return _refuse
    assert isinstance(adapters.loader, FirstLoader)
    return adapters.loader.hear


def _refuse(rank: int, answer: AdapterLoaded) -> None:
    raise RuntimeError(f"rank {rank} answers {answer}, and was asked for no adapter")


@contextmanager
def _other_ranks(settings: EngineSettings, source: ModelSource) -> Iterator[Ranks]:
    """Starts the ranks, which load; ends them if the block fails."""
    # The files are local by now: no rank needs to look for them or download them again.
    found = replace(settings, model=replace(settings.model, model=str(source.path)))
    ranks = Ranks(settings.model.tensor_parallel_size, found)
    try:
        yield ranks
    except BaseException:
        ranks.kill()
        ranks.close()
        leave_group()
        raise
