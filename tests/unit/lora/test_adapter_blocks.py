"""Device memory in blocks (--max-loras auto): each adapter takes what its own ranks need."""

from __future__ import annotations

import pytest

from manyroots.errors import RequestError
from manyroots.lora.limits import DeviceBlocks
from manyroots.step import DropAdapter, LoadAdapter
from tests.unit.lora.adapters import Adapters, content

BLOCK = 1000


def with_blocks(num_blocks: int, *, num_slots: int = 64, max_cpu_loras: int = 0) -> Adapters:
    blocks = DeviceBlocks(num_blocks, BLOCK, num_slots)
    return Adapters(max_loras=0, max_cpu_loras=max_cpu_loras, blocks=blocks)


def test_a01_adapters_take_blocks_by_their_own_size() -> None:
    """A01: ten small ones are there where one of the largest size would fill all."""
    adapters = with_blocks(10)
    for number in range(10):
        adapters.register(str(number), num_bytes=BLOCK - 1)
    adapters.register("large", num_bytes=9 * BLOCK + 1)
    adapters.bring(*map(str, range(10)))
    assert len(adapters.on_device()) == 10
    assert adapters.residency.slots.num_free_blocks == 0
    adapters.bring("large")
    assert adapters.on_device() == {"large"}


def test_a01_what_leaves_is_the_longest_idle_and_no_more_than_is_needed() -> None:
    """A01, W01"""
    adapters = with_blocks(10)
    sizes = {"a": 1, "b": 5, "c": 2, "d": 2}
    for name, size in sizes.items():
        adapters.register(name, num_bytes=size * BLOCK)
    adapters.register("new", num_bytes=4 * BLOCK)
    adapters.bring(*sizes)
    assert adapters.prepare("new") == ["new"]
    (load,) = adapters.flush()[0]
    adapters.answer(load)
    assert adapters.on_device() == {"a", "c", "d", "new"}, "a is older, but b makes the room alone"


def test_a01_memory_is_given_up_before_it_is_taken() -> None:
    """A01: the execute half carries intents out in their order."""
    adapters = with_blocks(4)
    adapters.register("a", num_bytes=2 * BLOCK)
    adapters.register("b", num_bytes=2 * BLOCK)
    adapters.register("both", num_bytes=4 * BLOCK)
    adapters.bring("a", "b")
    adapters.prepare("both")
    drop, load = adapters.residency.flush()
    assert isinstance(drop, DropAdapter)
    assert drop.digest == content("b"), "a's slot is cleared by the load"
    assert isinstance(load, LoadAdapter)


def test_a01_no_block_is_taken_from_running_requests_steps_and_pins() -> None:
    """A01, W03: what runs, cools down or is pinned stays, and others wait."""
    adapters = with_blocks(6)
    adapters.register("pinned", num_bytes=2 * BLOCK, is_pinned=True)
    (load,) = adapters.flush()[0]
    adapters.answer(load)
    adapters.register("runs", num_bytes=2 * BLOCK)
    adapters.register("wants", num_bytes=3 * BLOCK)
    hold = adapters.begin("runs")
    assert adapters.prepare("wants") == ["wants"]
    assert adapters.flush()[0] == [], "two blocks are free, and three are wanted"
    adapters.end_fetches()
    adapters.launch(1)
    adapters.end(hold)
    adapters.prepare("wants")
    assert adapters.flush()[0] == [], "a launched step may still use them"
    adapters.done(1)
    adapters.prepare("wants")
    (load,) = adapters.flush()[0]
    assert load.digest == content("wants")


def test_a01_fits_counts_blocks_and_pins() -> None:
    adapters = with_blocks(10)
    for name, size in {"a": 4, "b": 4, "c": 2}.items():
        adapters.register(name, num_bytes=size * BLOCK)
    adapters.register("p", num_bytes=2 * BLOCK, is_pinned=True)
    residency = adapters.residency
    a, b, c, p = (content(name) for name in "abcp")
    assert residency.fits([a, b], 8)
    assert not residency.fits([a, b, c], 10), "p is beside them"
    assert residency.fits([a, b, p], 10)
    assert not residency.fits([a, b, p], 10, leaves_spare=True)
    assert residency.fits([a, c], 6, leaves_spare=True)


def test_a01_an_adapter_larger_than_the_memory_is_refused() -> None:
    """A01, W12: at the door, with its size; nothing has changed."""
    adapters = with_blocks(4)
    adapters.register("p", num_bytes=2 * BLOCK, is_pinned=True)
    with pytest.raises(RequestError, match="Unload a pinned adapter"):
        adapters.register("a", num_bytes=3 * BLOCK)
    assert list(adapters.residency.registry.loaded) == ["p"]
    adapters.register("b", num_bytes=2 * BLOCK)
    with pytest.raises(RequestError, match="another adapter would never fit"):
        adapters.register("c", num_bytes=1 * BLOCK, is_pinned=True)


def test_a01_slots_are_addresses_and_end_too() -> None:
    """A01: with more adapters than slots, blocks that are left do not help."""
    adapters = with_blocks(100, num_slots=2)
    for name in "abc":
        adapters.register(name)
    adapters.bring("a", "b", "c")
    assert adapters.on_device() == {"b", "c"}


def test_a01_host_copies_are_never_fewer_than_adapters_on_the_device() -> None:
    """W11"""
    adapters = with_blocks(100, max_cpu_loras=3)
    for name in "abcd":
        adapters.register(name)
    adapters.bring("a", "b", "c", "d")
    assert adapters.on_device() == adapters.on_host() == {"b", "c", "d"}
