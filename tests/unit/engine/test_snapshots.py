"""What the engine tells the page: why requests wait, the last steps, and a tree that is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.cache.inspection import TreeWalk
from manyroots.engine.snapshots import EngineMemory, EngineParts, Snapshots
from manyroots.ids import AdapterDigest, AdapterName, StepId
from manyroots.lora.spec import AdapterSpec
from manyroots.observe.steps import SIZE, StepRing
from manyroots.snapshot import BASE_MODEL, MAX_STEPS, RequestView, Snapshot, SnapshotAsk
from manyroots.step import Plan, StepResult
from tests.helpers.scheduler_harness import SchedulerHarness, submit

NO_MEMORY = EngineMemory(1000, 10, [8])


def watched(engine: SchedulerHarness) -> Snapshots:
    engine.loop.ring = StepRing(8)
    parts = EngineParts(engine.scheduler, engine.cache, engine.adapters, NO_MEMORY, 8, 32)
    return Snapshots(parts, engine.loop, engine.loop.ring)


def look(snapshots: Snapshots, **more: bool | int) -> Snapshot:
    snapshots.ask(SnapshotAsk(1, **more))  # type: ignore[arg-type]
    while (answer := snapshots.answer()) is None:
        pass
    return answer


def requests(snapshot: Snapshot) -> dict[int, RequestView]:
    return {view.request_id: view for view in snapshot.requests}


def load(engine: SchedulerHarness, *names: str) -> None:
    for name in names:
        digest = AdapterDigest(name.encode().ljust(32, b"."))
        engine.scheduler.load_adapter(AdapterName(name), AdapterSpec(digest, 8, 100), path=name)


@pytest.mark.parametrize(
    ("settings", "prompts", "wait"),
    [
        ({"num_pages": 8}, [list(range(24)), list(range(24, 48))], "memory"),
        ({"max_num_seqs": 1}, [[1, 2], [3, 4]], "budget"),
        ({"policy": "priority", "max_num_seqs": 1}, [[1, 2], [3, 4], [5, 6]], "priority"),
    ],
    ids=["memory", "budget", "priority"],
)
def test_g07_a_request_that_waits_says_for_what(
    settings: dict[str, int], prompts: list[list[int]], wait: str
) -> None:
    """G07"""
    engine = SchedulerHarness(**settings)  # type: ignore[arg-type]
    snapshots = watched(engine)
    by_priority = settings.get("policy") == "priority"
    for number, prompt in enumerate(prompts, 1):
        priority = number if by_priority else 0
        engine.loop.handle(submit(number, prompt, max_tokens=8, priority=priority))
    engine.step()
    views = requests(look(snapshots))
    assert views[1].wait == ""
    assert views[len(prompts)].wait == wait
    engine.run()
    assert requests(look(snapshots)) == {}


def test_g07_an_adapter_that_waits_says_for_what() -> None:
    """G07: for its weights first, then for one of the places."""
    engine = SchedulerHarness(max_loras=1)
    snapshots = watched(engine)
    load(engine, "a", "b")
    engine.loop.handle(submit(1, [1, 2, 3], max_tokens=30, adapter="a"))
    assert requests(look(snapshots))[1].wait == "load"
    for _ in range(6):
        engine.step()
    engine.loop.handle(submit(2, [1, 2, 3], max_tokens=30, adapter="b"))
    engine.step()
    snapshot = look(snapshots)
    assert requests(snapshot)[2].wait == "adapter"
    adapters = {view.name: view for view in snapshot.adapters}
    assert (adapters["a"].state, adapters["a"].tier) == ("running", "device")
    assert adapters["a"].num_loads == 1
    assert adapters["b"].num_waiting == 1
    rows = snapshot.steps[-1].rows_by_adapter
    assert [(snapshot.adapter_names[number], count) for number, count in rows] == [("a", 1)]
    engine.run()


def test_g07_memory_adds_up_and_salts_are_numbers() -> None:
    """G07"""
    engine = SchedulerHarness(num_pages=16)
    snapshots = watched(engine)
    for number, salt in enumerate(["secret-one", "secret-two", None], 1):
        engine.loop.handle(submit(number, list(range(10)), max_tokens=6, salt=salt))
    engine.step()
    snapshot = look(snapshots, wants_tree=True)
    assert "secret" not in repr(snapshot)
    assert sorted(view.tenant for view in snapshot.requests) == [0, 1, 2]
    pages = [part for part in snapshot.memory if part.kind == "pages"]
    assert sum(part.num_units for part in pages) == 16
    assert sum(part.num_bytes for part in pages) == 16 * 8
    assert snapshot.tree is not None
    assert len(snapshot.tree.namespaces) == 3
    assert sum(node.units[0] for node in snapshot.tree.nodes) <= 16
    held = {view.node for view in snapshot.requests}
    assert held <= {node.node for node in snapshot.tree.nodes}
    engine.run()


def test_g07_a_large_tree_is_bounded_and_read_in_slices() -> None:
    """G07: the shortest runs are counted together, and nothing is lost."""
    engine = SchedulerHarness(num_pages=400, page_size=2)
    for number in range(1, 41):
        engine.loop.handle(submit(number, [1, 1, number % 50, number // 7, 9, 9], max_tokens=1))
        engine.run()
    walk = TreeWalk(engine.cache.index, lambda namespace: 1, most_nodes=10)
    num_slices = 0
    while walk.advance(7):
        num_slices += 1
    assert num_slices > 2
    whole = TreeWalk(engine.cache.index, lambda namespace: 1)
    while whole.advance(1000):
        pass
    assert len(whole.nodes) > 20
    together = [node for node in walk.nodes if node.num_nodes > 1 or node.node < 0]
    assert len(walk.nodes) - len(together) == 10
    shortest = min(node.num_pages for node in walk.nodes if node.node > 0)
    assert all(node.num_pages <= max(shortest, 3) for node in together)


def test_g07_hits_are_counted_where_requests_resume() -> None:
    """G07: and what goes hands its hits up."""
    engine = SchedulerHarness(num_pages=32, page_size=2)
    snapshots = watched(engine)
    for number in range(1, 5):
        engine.loop.handle(submit(number, [1, 2, 3, 4, 5, 6, number], max_tokens=1))
        engine.run()
    tree = look(snapshots, wants_tree=True).tree
    assert tree is not None
    assert sum(node.hits for node in tree.nodes) == 3
    assert tree.next_evicted
    engine.cache.evict_all()
    assert look(snapshots, wants_tree=True).tree.nodes == []  # type: ignore[union-attr]


def plan(number: int, rows: int, tokens: int = 1) -> Plan:
    return Plan(
        StepId(number), (), (), np.arange(rows, dtype=np.int32),
        np.full(rows, tokens, np.int32), np.ones(rows, np.bool_),
    )  # fmt: skip


def test_g07_the_ring_keeps_the_last_steps_and_no_more() -> None:
    """G07: fixed in size, whatever was launched."""
    ticks = iter(range(100_000))
    ring = StepRing(8, clock=lambda: next(ticks))
    for number in range(1, 3 * SIZE):
        ring.launched(plan(number, 4))
        ring.done(StepResult(StepId(number), np.zeros(4, np.int32), is_graph=number % 2 == 0))
    steps = ring.since(0)
    assert [step.step_id for step in steps] == list(range(3 * SIZE - MAX_STEPS, 3 * SIZE))
    assert steps[-1].rows_by_adapter == [(BASE_MODEL, 4)]
    assert [step.is_graph for step in steps[-2:]] == [True, False]
    assert all(step.milliseconds > 0 for step in steps)
    assert ring.since(3 * SIZE - 3) == steps[-2:]
    assert ring.explain(1) is None
    explained = ring.explain(3 * SIZE - 1)
    assert explained is not None
    assert len(explained.rows) == 4
    ring.launched(plan(3 * SIZE, 2))
    assert ring.since(3 * SIZE - 1)[0].milliseconds == 0, "it still runs"
