"""Many tenants cost no more to plan than one (L08): counted, whatever the machine is busy with."""

from __future__ import annotations

import cProfile

import pytest

from manyroots.bench.scheduler_tenants import POLICIES, _plan_ms, measure_tenants, tenant_lines


def num_calls(policy: str, num_tenants: int) -> int:
    """Of functions of the scheduler, to submit 1280 requests and begin 256."""
    profile = cProfile.Profile()
    profile.runcall(_plan_ms, policy, num_tenants, 1280)
    stats = profile.getstats()
    return sum(
        entry.callcount
        for entry in stats
        if not isinstance(entry.code, str) and "scheduler" in entry.code.co_filename
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_l08_a_step_costs_the_same_with_many_tenants(policy: str) -> None:
    """L08: function calls of submitting 1280 and beginning 256, 1 tenant and 1280."""
    one = num_calls(policy, 1)
    many = num_calls(policy, 1280)
    assert many <= 1.3 * one


def test_the_bench_prints_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyroots.bench.scheduler_tenants.NUM_ROUNDS", 1)
    figures = measure_tenants((1, 64))
    assert [(each["policy"], each["tenants"]) for each in figures] == [
        (policy, count) for policy in POLICIES for count in (1, 64)
    ]
    lines = tenant_lines(figures)
    assert len(lines) == 9
    assert "times one tenant's" in lines[-1]
