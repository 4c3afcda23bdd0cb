"""Simulated host tier, storage and adapters, where the outcome is known beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyroots.errors import ConfigError
from manyroots.ids import Tier
from manyroots.messages import FinishReason
from manyroots.simulate.costs import with_costs
from manyroots.simulate.faults import Faults
from manyroots.simulate.settings import BLOCK_BYTES, SimulationSettings
from manyroots.simulate.simulation import simulate
from manyroots.simulate.summary import summarize
from manyroots.simulate.trace import Trace
from tests.unit.simulate.traces import COSTS, line

SMALL = SimulationSettings(num_pages=9, max_num_seqs=4)
"""Room for one of the prompts below, not for two."""

THERE_AND_BACK: Trace = (
    line(0.0, ("p", 130)),
    line(1.0, ("q", 130)),
    line(2.0, ("p", 130)),
)


def test_what_left_the_device_comes_back_from_the_host() -> None:
    """T01: 8 pages of the first prompt are loaded back, which takes its time, and less than
    computing them."""
    settings = replace(SMALL, num_host_pages=40)
    runs = [simulate(THERE_AND_BACK, s, COSTS, seed=0, audit=True) for s in (SMALL, settings)]
    alone, tiered = (run.records[2] for run in runs)
    assert (alone.num_cached_tokens, tiered.num_cached_tokens) == (0, 128)
    load_s = COSTS.transfer_s(Tier.HOST, 8 * 16 * COSTS.kv_bytes_per_token)
    assert tiered.ttft_s > load_s
    rates = summarize(runs[1]).hit_rate_by_tier
    assert rates == {"device": pytest.approx(0.0), "host": pytest.approx(128 / 390)}
    assert runs[1].num_copied_pages["host to device"] == 8


def test_a_slow_link_makes_the_first_token_late_by_its_own_time() -> None:
    settings = replace(SMALL, num_host_pages=40)
    ttfts = [
        simulate(THERE_AND_BACK, settings, costs, seed=0).records[2].ttft_s
        for costs in (COSTS, with_costs(COSTS, {"host_latency_s": 0.101}))
    ]
    assert ttfts[1] - ttfts[0] == pytest.approx(0.1)


@pytest.mark.parametrize("write_back", ["through", "reused", "eviction"])
def test_every_write_back_finishes_everything(write_back: str) -> None:
    settings = replace(SMALL, num_host_pages=20, write_back=write_back, storage=True)
    checked, unchecked = (
        simulate(THERE_AND_BACK * 2, settings, COSTS, seed=0, audit=audit)
        for audit in (True, False)
    )
    assert all(record.is_whole for record in checked.records)
    assert replace(checked, num_audits=0) == unchecked


def test_storage_gives_back_what_the_host_had_no_room_for() -> None:
    settings = replace(SMALL, num_host_pages=16)
    with_storage = replace(settings, storage=True)
    trace = (*THERE_AND_BACK[:2], line(2.0, ("r", 130)), line(3.0, ("p", 130)))
    runs = [simulate(trace, s, COSTS, seed=0, audit=True) for s in (settings, with_storage)]
    assert [run.records[3].num_cached_tokens for run in runs] == [0, 128]
    assert runs[1].num_copied_pages["storage to host"] >= 8


def test_copies_that_all_fail_cost_time_and_no_answer() -> None:
    settings = replace(SMALL, num_host_pages=40)
    run = simulate(
        THERE_AND_BACK, settings, COSTS, seed=0, faults=Faults(failed_transfers=1.0), audit=True
    )
    assert run.num_bad_copies > 0
    assert all(record.is_whole for record in run.records)
    assert run.records[2].num_cached_tokens == 0


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_t05_a_slow_tier_makes_no_hit_slower_than_a_miss(tier: str) -> None:
    """T05: measured as the run goes on: the first use of the tier is slow, and no other."""
    trace = tuple(line(20.0 * i, ("pqrs"[i % 4], 130)) for i in range(40))
    slow = with_costs(COSTS, {f"{tier}_bytes_per_s": 128 * COSTS.kv_bytes_per_token / 10})
    settings = replace(SMALL, num_host_pages=40)
    if tier == "storage":
        settings = replace(SMALL, num_host_pages=16, storage=True)
    alone, tiered = (simulate(trace, s, slow, seed=0) for s in (SMALL, settings))
    is_slower = [
        hit.ttft_s > miss.ttft_s + 1e-9
        for hit, miss in zip(tiered.records, alone.records, strict=True)
    ]
    assert sum(is_slower) == 1
    assert tiered.num_copied_pages[f"{tier} to {'host' if tier == 'storage' else 'device'}"] > 0
    quick = simulate(trace, settings, COSTS, seed=0)
    assert quick.num_hit_tokens > 20 * 128


def test_t03_dead_storage_is_soon_left_alone_and_costs_no_answer() -> None:
    """T03: the host serves as it would without storage, and few copies are lost on the dead."""
    trace = tuple(line(0.5 * i, ("pqr"[i % 3], 130)) for i in range(300))
    host = replace(SMALL, num_host_pages=40)
    storage = replace(host, storage=True, num_host_pages=12)
    dead = simulate(
        trace, replace(host, storage=True), COSTS, seed=0, faults=Faults(dead_storage=1.0),
        audit=True,
    )  # fmt: skip
    assert all(record.is_whole for record in dead.records)
    alone = simulate(trace, host, COSTS, seed=0)
    assert dead.num_hit_tokens == alone.num_hit_tokens > 0
    small = simulate(trace, storage, COSTS, seed=0, faults=Faults(dead_storage=1.0), audit=True)
    alive = simulate(trace, storage, COSTS, seed=0)
    assert all(record.is_whole for record in small.records)
    ways = [
        copied["storage to host"] for copied in (small.num_copied_pages, alive.num_copied_pages)
    ]
    assert ways[0] < ways[1] / 4
    assert small.storage is not None
    assert small.storage.total_outages == 2  # reading and writing
    assert small.num_bad_copies < 30


def test_the_first_request_of_an_adapter_waits_for_its_load() -> None:
    """W05: from storage once, then it is there."""
    trace = (
        line(0.0, ("p", 100)),
        line(5.0, ("q", 100), adapter="a"),
        line(9.0, ("r", 100), adapter="a"),
    )
    run = simulate(trace, SMALL, COSTS, seed=0, audit=True)
    base, first, second = (record.ttft_s for record in run.records)
    assert second == pytest.approx(base)
    assert first == pytest.approx(base + COSTS.adapter_load_s(Tier.STORAGE))
    groups = {group.name: group.ttft_s.max for group in summarize(run).by_adapter}
    assert groups == {"(base)": pytest.approx(base), "a": pytest.approx(first)}


def test_an_adapter_that_lost_its_slot_comes_back_from_host_memory() -> None:
    trace = tuple(line(3.0 * i, ("p", 100), adapter=name) for i, name in enumerate("aba"))
    run = simulate(trace, replace(SMALL, max_loras=1), COSTS, seed=0, audit=True)
    assert run.num_adapter_loads == {"host": 1, "storage": 2}
    # The third one finds its prompt too.
    from_host = COSTS.adapter_load_s(Tier.HOST)
    assert from_host < run.records[2].ttft_s < run.records[1].ttft_s


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    trace = (line(0.0, ("p", 40), adapter="a"), line(0.0, ("p", 40)))
    faults = Faults(failed_transfers=1.0)
    run = simulate(trace, SMALL, COSTS, seed=0, faults=faults, audit=True)
    assert [r.finish_reason for r in run.records] == [FinishReason.ERROR, FinishReason.LENGTH]


def test_requests_outlive_the_reload_of_their_adapter() -> None:
    trace = tuple(line(0.3 * i, ("p", 40), adapter="a", output_tokens=12) for i in range(40))
    faults = Faults(adapter_reloads=0.5)
    run = simulate(trace, SMALL, COSTS, seed=0, faults=faults, audit=True)
    assert run.num_adapter_reloads > 10
    refused = [r for r in run.records if r.namespace is None]
    assert all(r.is_whole != (r in refused) for r in run.records)
    assert len({r.namespace for r in run.records if r.namespace}) > 1


@pytest.mark.parametrize(("num_fit", "num_loads"), [(6, 6), (3, 18)])
def test_a01_adapters_share_memory_as_in_the_server(num_fit: int, num_loads: int) -> None:
    """A01: six adapters in turn, three times; where all fit, each is loaded once."""
    trace = tuple(
        line(60.0 * number, ("p", 20), adapter=f"adapter {number % 6}") for number in range(18)
    )
    room = replace(SMALL, adapter_memory_bytes=num_fit * (COSTS.adapter_bytes + BLOCK_BYTES))
    run = simulate(trace, room, COSTS, seed=0, audit=True)
    assert all(record.is_whole for record in run.records)
    assert sum(run.num_adapter_loads.values()) == num_loads


def test_memory_for_adapters_and_a_number_of_them_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="leave out --max-loras"):
        replace(SMALL, max_loras=2, adapter_memory_bytes=2**30)
    with pytest.raises(ConfigError, match="a block has"):
        replace(SMALL, adapter_memory_bytes=1.0)
