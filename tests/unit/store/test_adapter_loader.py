"""The loader: asynchronous, one answer per load, host copies by content."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from manyroots.errors import ManyrootsError
from manyroots.ids import AdapterDigest, AdapterSlot, Tier
from manyroots.lora.targets import TargetKind
from manyroots.step import AdapterLoaded, DropAdapter, LoadAdapter, LoadId, SlotRef
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_sites import LoraSite
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.patience import PATIENCE_S
from tests.unit.host_copies import host_copy


class Files:
    """Storage whose reads can be held up and counted."""

    def __init__(self) -> None:
        self.contents: dict[str, AdapterWeights | ManyrootsError] = {}
        self.reads: list[str] = []
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, path: str) -> AdapterWeights:
        assert self.may_read.wait(PATIENCE_S)
        self.reads.append(path)
        content = self.contents[path]
        if isinstance(content, ManyrootsError):
            raise content
        return content


def content(name: str) -> AdapterWeights:
    return host_copy({"proj": (torch.ones(2, 4), torch.ones(3, 2), 1.0)}, name)


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def loader(files: Files) -> Iterator[AdapterLoader]:
    site = LoraSite(TargetKind.LINEAR, 4, {"": 3})
    pool = AdapterPool(
        dict(site.targets("proj")), num_slots=4, max_rank=2, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    loader = AdapterLoader(files.read, pool)
    yield loader
    files.may_read.set()
    loader.close()


def load(load_id: int, name: str, slot: int = 0, generation: int = 1) -> LoadAdapter:
    return LoadAdapter(
        LoadId(load_id), AdapterDigest(name.encode()), Tier.STORAGE,
        SlotRef(AdapterSlot(slot), generation), path=name, num_bytes=1,
    )  # fmt: skip


def answers(loader: AdapterLoader, count: int) -> list[AdapterLoaded]:
    found: list[AdapterLoaded] = []
    while len(found) < count:
        loader.wait(PATIENCE_S)
        news = loader.finished()
        assert news, "no answer came"
        found.extend(news)
    return found


def is_loaded(loader: AdapterLoader, slot: int) -> bool:
    try:
        return loader.pool.weights(slot) is not None
    except RuntimeError:
        return False


def test_a_load_runs_beside_the_steps_and_its_answer_comes_later_w10(
    loader: AdapterLoader, files: Files
) -> None:
    """W10: loads are asynchronous."""
    files.contents["a"] = content("a")
    files.may_read.clear()
    loader.start([load(1, "a")])
    loader.wait(0.01)
    assert loader.finished() == ()
    assert not is_loaded(loader, 0)
    files.may_read.set()
    assert answers(loader, 1) == [AdapterLoaded(LoadId(1), None)]
    assert is_loaded(loader, 0)
    assert loader.finished() == ()


def test_an_adapter_in_host_memory_does_not_wait_for_another_ones_files_w10(
    loader: AdapterLoader, files: Files
) -> None:
    """W10: a slow load holds up its own requests alone."""
    files.contents |= {"fast": content("fast"), "slow": content("slow")}
    loader.start([load(1, "fast")])
    answers(loader, 1)
    files.may_read.clear()
    loader.start([load(2, "slow", slot=1), load(3, "fast", slot=2)])
    assert [answer.load_id for answer in answers(loader, 1)] == [3]


def test_a_failed_load_says_why_and_can_be_tried_again_w10(
    loader: AdapterLoader, files: Files
) -> None:
    """W10: a failed load fails only its own requests with the reason and can be retried."""
    files.contents |= {"a": ManyrootsError("rank 9 is too high"), "b": content("b")}
    loader.start([load(1, "a"), load(2, "b", slot=1)])
    by_id = {answer.load_id: answer.error for answer in answers(loader, 2)}
    assert by_id == {1: "rank 9 is too high", 2: None}
    assert not is_loaded(loader, 0)
    assert is_loaded(loader, 1)
    files.contents["a"] = content("a")
    loader.start([load(3, "a")])
    assert answers(loader, 1)[0].error is None


def test_files_that_are_not_what_was_opened_are_refused(
    loader: AdapterLoader, files: Files
) -> None:
    files.contents["a"] = content("other weights")
    loader.start([load(1, "a")])
    error = answers(loader, 1)[0].error
    assert error is not None
    assert "changed since the adapter was opened" in error
    assert not is_loaded(loader, 0)


def test_a_fault_of_any_kind_is_an_answer(loader: AdapterLoader, files: Files) -> None:
    loader.start([load(1, "nowhere")])
    assert answers(loader, 1) == [AdapterLoaded(LoadId(1), "KeyError: 'nowhere'")]


def test_host_copies_are_read_once_and_go_when_dropped(loader: AdapterLoader, files: Files) -> None:
    files.contents["a"] = content("a")
    loader.start([load(1, "a")])
    answers(loader, 1)
    loader.start([load(2, "a", slot=3)])
    answers(loader, 1)
    assert files.reads == ["a"]
    loader.start([DropAdapter(AdapterDigest(b"a"), Tier.HOST), load(3, "a", slot=4)])
    answers(loader, 1)
    assert files.reads == ["a", "a"]


def test_what_was_read_to_open_an_adapter_is_not_read_again(
    loader: AdapterLoader, files: Files
) -> None:
    """Two that were opened at once as well: each is kept until its copy is dropped."""
    loader.keep(content("a"))
    loader.keep(content("b"))
    loader.start([load(1, "a"), load(2, "b", slot=1)])
    assert {answer.error for answer in answers(loader, 2)} == {None}
    assert files.reads == []
    files.contents["a"] = content("a")
    loader.start([DropAdapter(AdapterDigest(b"a"), Tier.HOST), load(3, "a", generation=2)])
    assert {answer.error for answer in answers(loader, 1)} == {None}
    assert files.reads == ["a"], "a copy that was dropped is gone"


def test_a_load_to_the_host_touches_no_slot_and_is_what_the_next_load_takes(
    loader: AdapterLoader, files: Files
) -> None:
    files.contents |= {"a": content("a"), "b": content("b")}
    loader.start([load(1, "a")])
    answers(loader, 1)
    loader.start([replace(load(2, "b"), target=None)])
    assert answers(loader, 1) == [AdapterLoaded(LoadId(2), None)]
    assert is_loaded(loader, 0)
    loader.start([load(3, "b", slot=1)])
    answers(loader, 1)
    assert files.reads == ["a", "b"]


def test_a_slot_is_cleared_only_by_a_drop_of_its_own_generation_w07(
    loader: AdapterLoader, files: Files
) -> None:
    """W07: a slot taken before a deferred unload ran: the unload is a no-op there."""
    files.contents |= {"a": content("a"), "b": content("b")}
    loader.start([load(1, "a", generation=1)])
    answers(loader, 1)
    loader.start([load(2, "b", generation=2)])
    answers(loader, 1)
    loader.start([DropAdapter(AdapterDigest(b"a"), Tier.DEVICE, SlotRef(AdapterSlot(0), 1))])
    assert is_loaded(loader, 0)
    loader.start([DropAdapter(AdapterDigest(b"b"), Tier.DEVICE, SlotRef(AdapterSlot(0), 2))])
    assert not is_loaded(loader, 0)


def test_waiting_for_nothing_returns_at_once(loader: AdapterLoader) -> None:
    loader.wait(PATIENCE_S)
    assert loader.finished() == ()
