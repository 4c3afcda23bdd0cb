"""The cost model: arithmetic that can be checked in the head, and presets true to their origin."""

from __future__ import annotations

import pytest

from manyroots.errors import ConfigError
from manyroots.ids import Tier
from manyroots.simulate.clock import Clock
from manyroots.simulate.costs import CostModel, StepLoad, with_costs
from manyroots.simulate.links import Link
from manyroots.simulate.presets import (
    H200_QWEN3_8B,
    H200_QWEN3_8B_VLLM,
    PRESETS,
    ROUND_NUMBERS,
    preset,
)

ROUND = ROUND_NUMBERS.costs


def decode(costs: CostModel, batch: int, context: int) -> float:
    return costs.step_s(StepLoad(0, 0, batch, batch * context))


def prefill(costs: CostModel, num_prompts: int, length: int, budget: int = 2048) -> float:
    """Whole prompts in steps of so many tokens."""
    num_steps = num_prompts * length // budget
    per_step = budget // length
    pairs = per_step * length * (length + 1) // 2
    return num_steps * costs.step_s(StepLoad(budget, pairs, 0, 0))


def test_a_step_adds_up_its_parts() -> None:
    load = StepLoad(
        num_prefill_tokens=500, num_prefill_pairs=7, num_decode_rows=3, num_context_tokens=2000
    )
    assert ROUND.step_s(load) == pytest.approx(0.01 + 0.05 + 0.003 + 0.002)


@pytest.mark.parametrize(("batch", "ms"), [(8, 4.318), (64, 6.096), (128, 7.789), (256, 12.607)])
def test_the_h200_preset_gives_the_measured_decode_steps(batch: int, ms: float) -> None:
    # Prompts of 512 tokens and 128 new ones: 576 on average.
    assert 1000 * decode(H200_QWEN3_8B.costs, batch, 576) == pytest.approx(ms, rel=0.05)


@pytest.mark.parametrize(("batch", "ms"), [(1, 5.25), (8, 6.31)])
def test_the_h200_preset_gives_the_measured_steps_with_guesses(batch: int, ms: float) -> None:
    # Prompts of 256 tokens and 160 new ones, four guesses a row: five positions, 336 on average.
    costs = H200_QWEN3_8B.costs
    found = costs.unoverlapped_step_s + decode(costs, 5 * batch, 336)
    assert 1000 * found == pytest.approx(ms, rel=0.15)


@pytest.mark.parametrize(("num_prompts", "seconds"), [(64, 0.738), (128, 1.473), (256, 2.955)])
def test_the_h200_preset_gives_the_measured_prefills(num_prompts: int, seconds: float) -> None:
    found = prefill(H200_QWEN3_8B.costs, num_prompts, 512, budget=32768)
    assert found == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(("batch", "ms"), [(1, 5.18), (8, 5.57), (32, 6.11), (64, 6.94)])
def test_vllms_preset_gives_the_measured_decode_steps(batch: int, ms: float) -> None:
    assert 1000 * decode(H200_QWEN3_8B_VLLM.costs, batch, 576) == pytest.approx(ms, rel=0.02)


@pytest.mark.parametrize(("num_prompts", "seconds"), [(8, 0.108), (32, 0.381), (64, 0.767)])
def test_vllms_preset_gives_the_measured_prefills(num_prompts: int, seconds: float) -> None:
    assert prefill(H200_QWEN3_8B_VLLM.costs, num_prompts, 512) == pytest.approx(seconds, rel=0.12)


def test_transfers_take_latency_and_bandwidth() -> None:
    assert ROUND.transfer_s(Tier.HOST, 10e9) == pytest.approx(1.001)
    assert ROUND.transfer_s(Tier.STORAGE, 1e9) == pytest.approx(1.01)
    with pytest.raises(ValueError, match="lower end"):
        ROUND.transfer_s(Tier.DEVICE, 1)


def test_an_adapter_loads_from_the_tier_it_is_found_on() -> None:
    assert ROUND.adapter_load_s(Tier.DEVICE) == 0
    assert ROUND.adapter_load_s(Tier.HOST) == pytest.approx(0.011)
    assert ROUND.adapter_load_s(Tier.STORAGE) == 0.5


def test_copies_on_one_link_wait_for_each_other() -> None:
    link = Link(ROUND, Tier.HOST)
    assert link.send(0.0, 10e9) == pytest.approx(1.001)
    assert link.send(0.5, 10e9) == pytest.approx(2.002)
    assert link.send(5.0, 10e9, slowed_by=20) == pytest.approx(5 + 20 * 1.001)
    assert link.total_bytes == 30e9


def test_any_number_can_be_replaced() -> None:
    changed = with_costs(ROUND, {"step_overhead_s": 1.0, "kv_memory_bytes": 64_000})
    assert changed.step_s(StepLoad(0, 0, 0, 0)) == 1.0
    assert changed.num_pages(16) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_overheads": 1.0}, "no cost is called 'step_overheads'"),
        ({"step_overhead_s": -1.0}, "step_overhead_s is -1.0"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s is 0.0; it must be a finite number"),
        ({"host_latency_s": float("nan")}, "host_latency_s is nan"),
    ],
)
def test_costs_that_cannot_be_are_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_costs(ROUND, changes)


def test_every_preset_says_where_it_comes_from() -> None:
    assert all(found.title and found.origin for found in PRESETS.values())
    with pytest.raises(ConfigError, match="h200-qwen3-8b"):
        preset("h100")


def test_time_never_runs_backwards() -> None:
    clock = Clock()
    clock.wait_until(2.0)
    clock.wait_until(1.0)
    assert clock.now_s == 2.0
