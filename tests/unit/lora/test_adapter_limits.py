"""Sizes of the tiers, and eviction from each."""

from __future__ import annotations

import pytest

from manyroots.errors import ConfigError
from manyroots.ids import AdapterName, Tier
from manyroots.lora.audit import audit
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec
from tests.unit.lora.adapters import Adapters, content, named


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(4, 3), (2, 1), (-1, 0), (1, -1)])
def test_w01_impossible_sizes_are_refused_naming_the_flags(
    max_loras: int, max_cpu_loras: int
) -> None:
    with pytest.raises(ConfigError, match=r"--max-(cpu-)?loras"):
        AdapterLimits(max_loras=max_loras, max_cpu_loras=max_cpu_loras)


def test_w01_host_smaller_than_the_device_names_both_flags_and_the_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        AdapterLimits(max_loras=4, max_cpu_loras=3)
    for part in ("--max-cpu-loras is 3", "--max-loras 4", "at least 4"):
        assert part in str(caught.value)


def test_w01_spare_slots_need_their_host_copies_too() -> None:
    with pytest.raises(ConfigError, match="the 3 device slots"):
        AdapterLimits(max_loras=2, max_cpu_loras=2, num_spare_slots=1)


@pytest.mark.parametrize(
    ("max_loras", "max_cpu_loras", "num_slots"), [(4, 4, 4), (4, 0, 4), (0, 6, 6), (0, 0, None)]
)
def test_l02_zero_means_no_limit(max_loras: int, max_cpu_loras: int, num_slots: int | None) -> None:
    limits = AdapterLimits(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    assert limits.num_slots == num_slots
    assert limits.num_host_copies == (max_cpu_loras or None)


def test_l02_without_a_cap_every_adapter_runs_at_once() -> None:
    adapters = Adapters(max_loras=0)
    names = [f"a{number}" for number in range(50)]
    for name in names:
        adapters.register(name)
    assert adapters.prepare(*names) == names
    for load in adapters.flush()[0]:
        adapters.answer(load)
    slots = [adapters.seat(adapters.acquire(name)) for name in names]
    assert slots == list(range(50))


def test_w01_the_adapter_least_recently_on_the_device_leaves_each_tier_first() -> None:
    adapters = Adapters(max_loras=2, max_cpu_loras=3)
    for name in "abcd":
        adapters.register(name)
    adapters.bring("a", "b")
    adapters.prepare("a")  # used again: now b is the older one
    adapters.bring("c")
    assert adapters.on_device() == {"a", "c"}
    assert adapters.on_host() == {"a", "b", "c"}
    adapters.prepare("d")
    loads, drops = adapters.flush()
    assert loads[0].source is Tier.STORAGE
    assert named(drops) == [("b", Tier.HOST)]
    adapters.answer(loads[0])
    assert adapters.on_device() == {"c", "d"}
    assert adapters.on_host() == {"a", "c", "d"}


def test_w01_an_adapter_comes_back_from_the_highest_tier_that_has_it() -> None:
    adapters = Adapters(max_loras=1, max_cpu_loras=2)
    for name in "abc":
        adapters.register(name)
    adapters.bring("a", "b")
    adapters.prepare("a")
    (load,), drops = adapters.flush()
    assert load.source is Tier.HOST
    assert not drops
    adapters.answer(load)
    adapters.bring("c")  # host memory has room for a and c
    adapters.prepare("b")
    (load,), _ = adapters.flush()
    assert load.source is Tier.STORAGE
    assert load.path == "/adapters/b"


def test_w11_host_eviction_takes_no_adapter_that_is_on_the_device() -> None:
    """W11: the one on the device is far older on the host, and still stays."""
    adapters = Adapters(max_loras=2, max_cpu_loras=3)
    for name in "abcde":
        adapters.register(name)
    running = adapters.begin("a")
    adapters.bring("b", "c")  # b leaves the device for c
    for name, victim in [("d", "b"), ("e", "c"), ("b", "d")]:
        adapters.prepare(name)
        (load,), drops = adapters.flush()
        assert named(drops) == [(victim, Tier.HOST)]
        adapters.answer(load)
    assert running.slot is not None
    assert "a" in adapters.on_host()


def test_w11_host_copies_that_old_requests_need_go_last() -> None:
    """W05, W11: files of an unloaded adapter may be gone, so its copy outlives younger ones."""
    adapters = Adapters(max_loras=1, max_cpu_loras=2)
    for name in "abc":
        adapters.register(name)
    adapters.bring("a")
    retracted = adapters.acquire("a")
    adapters.unload("a")
    adapters.bring("b")
    adapters.bring("c")
    assert adapters.on_host() == {"a", "c"}
    adapters.bring("a")
    adapters.end(retracted)


def test_a_slot_is_up_for_others_again_when_no_name_pins_its_adapter_any_more() -> None:
    residency = Residency(AdapterLimits(max_loras=3, max_cpu_loras=0))

    def register(name: str, text: str, *, is_pinned: bool) -> int | None:
        spec = AdapterSpec(content(text), 8, 1000)
        residency.register(AdapterName(name), spec, path=name, is_pinned=is_pinned)
        audit(residency)
        return residency.num_obtainable

    assert register("a", "same", is_pinned=False) == 3
    assert register("b", "same", is_pinned=True) == 2
    assert register("c", "same", is_pinned=True) == 2
    assert register("b", "same", is_pinned=False) == 2
    residency.unload(AdapterName("c"))
    audit(residency)
    assert residency.num_obtainable == 3
    assert register("b", "same", is_pinned=True) == 2
    assert register("b", "other", is_pinned=False) == 3
