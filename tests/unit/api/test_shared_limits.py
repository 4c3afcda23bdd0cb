"""Limits of keys that several gateways count together (M04)."""

from __future__ import annotations

import os

import pytest

from manyroots.api.shared_limits import GatewayLimits, SharedLimits
from manyroots.api.tenants import KeySpec, Tenant
from manyroots.errors import OverloadedError

SPEC = KeySpec(name="a", key="k", max_running=3, tokens_per_minute=600)


def tenants(limits: SharedLimits, now: list[float]) -> list[Tenant]:
    """One key, as each gateway has it."""
    return [
        Tenant(SPEC, lambda: now[0], limits.of_gateway(number).of_key(5))
        for number in range(limits.num_gateways)
    ]


def test_m04_sequences_and_tokens_of_all_gateways_count() -> None:
    now = [100.0]
    first, second = tenants(SharedLimits(2), now)
    lease = first.begin(2)
    assert second.num_running == 2
    with pytest.raises(OverloadedError, match="2 sequences are running"):
        second.begin(2)
    second.reserve(400, 10_000)
    with pytest.raises(OverloadedError, match="200 of 600 per minute"):
        first.reserve(300, 10_000)
    now[0] += 30.0
    first.reserve(300, 10_000)
    assert second.num_held_tokens == 700
    lease.release()
    assert second.num_running == 0
    second.begin(3)


def test_m03_m04_what_a_dead_gateway_held_is_free_for_its_successor_and_the_others() -> None:
    limits = SharedLimits(2)
    first, second = tenants(limits, [0.0])
    first.begin(2)
    second.begin(1)
    limits.of_gateway(0)  # the next process in its place
    assert second.num_running == 1
    second.begin(2)


def test_m04_processes_that_count_at_once_lose_nothing() -> None:
    limits, num_processes = SharedLimits(4), 4
    spec = KeySpec(name="a", key="k", max_running=10_000)
    children = []
    for number in range(num_processes):
        pid = os.fork()
        if pid == 0:
            tenant = Tenant(spec, counts=limits.of_gateway(number).of_key(0))
            for _ in range(500):
                tenant.begin(1)
                tenant.reserve(3, 10_000_000)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * num_processes
    # A look that clears nothing: as a gateway that is not started anew.
    seen = GatewayLimits(limits, 0).of_key(0)
    assert (seen.num_running, seen.num_held_tokens) == (2000, 6000)


def test_m04_a_process_that_dies_with_the_lock_does_not_keep_it() -> None:
    limits = SharedLimits(2)
    pid = os.fork()
    if pid == 0:
        limits.of_gateway(0).of_key(0).__enter__()
        os._exit(0)
    os.waitpid(pid, 0)
    assert Tenant(SPEC, counts=limits.of_gateway(1).of_key(0)).begin(1) is not None
