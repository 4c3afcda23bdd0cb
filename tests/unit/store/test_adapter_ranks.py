"""Loads on several ranks: one answer for all of them, and no rank left with half of it (W16)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from manyroots.distributed.shard import Shard
from manyroots.errors import AdapterError
from manyroots.ids import AdapterDigest, AdapterSlot, Tier
from manyroots.lora.targets import Side, Target, TargetKind
from manyroots.models.sharding import cut_adapter
from manyroots.step import AdapterIntent, AdapterLoaded, DropAdapter, LoadAdapter, LoadId, SlotRef
from manyroots.store.adapter_loader import AdapterLoader, Read
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_ranks import FirstLoader, FollowingLoader
from manyroots.store.adapter_sites import LoraSite
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.patience import PATIENCE_S
from tests.unit.host_copies import host_copy

TARGET = "model.layers.0.self_attn.q_proj"
TARGETS = {TARGET: Target(TargetKind.LINEAR, 4, 2, side=Side.OUTPUT)}


def whole(name: str) -> AdapterWeights:
    pair = (torch.ones(2, 4), torch.arange(12.0).view(6, 2), 1.0)
    return host_copy({TARGET: pair}, name)


class Ranks:
    """Three ranks' loaders, each with files that the test may hold up, change or break."""

    def __init__(self) -> None:
        self.may_read = [threading.Event() for _ in range(3)]
        self.contents = [whole("a") for _ in range(3)]
        self.broken: set[int] = set()
        self.num_reads = 0
        self.followers: list[AdapterLoader] = []
        self.first = FirstLoader(
            self._reader(0),
            self._pool(),
            num_ranks=3,
            cut=lambda weights: cut_adapter(weights, Shard(0, 3), TARGETS),
            drop_elsewhere=lambda drop: [each.start([drop]) for each in self.followers] and None,
        )
        for rank in (1, 2):
            self.followers.append(self._follower(rank))
        for event in self.may_read:
            event.set()

    def _follower(self, rank: int) -> AdapterLoader:
        def tell(answer: AdapterLoaded) -> None:
            self.first.hear(rank, answer)

        return FollowingLoader(self._reader(rank), self._pool(), tell)

    def _pool(self) -> AdapterPool:
        site = LoraSite(TargetKind.LINEAR, 4, {"": 2})
        return AdapterPool(
            dict(site.targets(TARGET)), num_slots=2, max_rank=4, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip

    def _reader(self, rank: int) -> Read:
        def read(path: str) -> AdapterWeights:
            assert self.may_read[rank].wait(PATIENCE_S)
            self.num_reads += 1
            if rank in self.broken:
                raise AdapterError("the disk is gone; mount it", field="path")
            return cut_adapter(self.contents[rank], Shard(rank, 3), TARGETS)

        return read

    @property
    def all(self) -> list[AdapterLoader]:
        return [self.first, *self.followers]

    def start(self, *intents: AdapterIntent) -> None:
        # The others may well be ahead of the first.
        for loader in reversed(self.all):
            loader.start(intents)

    def answer(self) -> AdapterLoaded:
        self.first.wait(PATIENCE_S)
        [answer] = self.first.finished()
        return answer

    def seated(self) -> list[bool]:
        """Which ranks have something in slot 0."""
        found = []
        for loader in self.all:
            try:
                found.append(loader.pool.weights(0) is not None)
            except RuntimeError:
                found.append(False)
        return found


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for event in ranks.may_read:
        event.set()
    for loader in ranks.all:
        loader.close()


def load(load_id: int = 1, generation: int = 1) -> LoadAdapter:
    return LoadAdapter(
        LoadId(load_id), AdapterDigest(b"a"), Tier.STORAGE, SlotRef(AdapterSlot(0), generation),
        path="folder", num_bytes=1,
    )  # fmt: skip


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_w16_a_load_is_answered_when_the_slowest_rank_has_it(ranks: Ranks, slow: int) -> None:
    """W16: no step may use a slot before every rank has its part in it."""
    ranks.may_read[slow].clear()
    ranks.start(load())
    deadline = time.monotonic() + PATIENCE_S
    while sum(ranks.seated()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ranks.first.wait(0.05)
    assert ranks.first.finished() == ()
    ranks.may_read[slow].set()
    assert ranks.answer() == AdapterLoaded(LoadId(1), None)
    assert ranks.seated() == [True, True, True]


@pytest.mark.parametrize("broken", [{0}, {1}, {1, 2}, {0, 1, 2}])
def test_w16_a_load_that_fails_on_one_rank_is_on_none(ranks: Ranks, broken: set[int]) -> None:
    """W16: a load that fails on one rank fails on all, and leaves no rank with half of it."""
    ranks.broken = broken
    ranks.start(load())
    error = ranks.answer().error
    assert error is not None
    assert "the disk is gone" in error
    assert error.startswith(f"on rank {min(broken)}") == (0 not in broken)
    assert ranks.seated() == [False, False, False]
    # As the scheduler does then: forget the host copies, and try again.
    ranks.broken = set()
    ranks.start(DropAdapter(AdapterDigest(b"a"), Tier.HOST), load(2, generation=2))
    assert ranks.answer() == AdapterLoaded(LoadId(2), None)
    assert ranks.seated() == [True, True, True]


def test_files_that_change_between_two_ranks_reads_are_a_failed_load(ranks: Ranks) -> None:
    ranks.contents[2] = whole("b")
    ranks.start(load())
    error = ranks.answer().error
    assert error is not None
    assert error.startswith("on rank 2: ")
    assert "changed" in error


def test_a_late_drop_does_not_touch_the_slots_next_owner(ranks: Ranks) -> None:
    ranks.start(load())
    assert ranks.answer().error is None
    ranks.start(load(2, generation=2))
    assert ranks.answer().error is None
    ranks.start(DropAdapter(AdapterDigest(b"a"), Tier.DEVICE, SlotRef(AdapterSlot(0), 1)))
    assert ranks.seated() == [True, True, True]


def test_what_the_first_rank_was_handed_whole_is_cut_and_not_read_again(ranks: Ranks) -> None:
    ranks.first.keep(whole("a"))
    ranks.start(load())
    assert ranks.answer().error is None
    assert ranks.num_reads == 2


def test_other_ranks_never_wait(ranks: Ranks) -> None:
    ranks.may_read[1].clear()
    ranks.start(load())
    began = time.monotonic()
    ranks.followers[0].wait(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
