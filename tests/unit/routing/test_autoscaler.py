"""How many replicas a deployment should have."""

from __future__ import annotations

import pytest

from manyroots.routing.autoscaler import Autoscaler, ReplicaLoad, ScaleLimits

LIMITS = ScaleLimits(
    min_replicas=1,
    max_replicas=3,
    target_requests=10,
    max_loras=4,
    upscale_delay_s=5.0,
    downscale_delay_s=60.0,
)


def load(num_replicas: int, num_requests: int, num_adapters: int = 0) -> ReplicaLoad:
    return ReplicaLoad(
        num_replicas=num_replicas, num_requests=num_requests, num_adapters=num_adapters
    )


@pytest.mark.parametrize(
    ("num_requests", "num_adapters", "needed"),
    [(0, 0, 1), (10, 0, 1), (11, 0, 2), (500, 0, 3), (2, 4, 1), (5, 5, 2), (9, 9, 3), (25, 5, 3)],
)
def test_m01_queue_and_adapters_say_how_many_are_needed(
    num_requests: int, num_adapters: int, needed: int
) -> None:
    assert Autoscaler(LIMITS).need(load(1, num_requests, num_adapters)) == needed


def test_m01_a_load_must_last_before_replicas_are_added() -> None:
    scaler = Autoscaler(LIMITS)
    assert scaler.wanted(0.0, load(1, 25)) == 1
    assert scaler.wanted(4.9, load(1, 25)) == 1
    assert scaler.wanted(5.0, load(1, 25)) == 3
    scaler = Autoscaler(LIMITS)
    assert scaler.wanted(0.0, load(1, 25)) == 1
    assert scaler.wanted(3.0, load(1, 5)) == 1  # it did not last
    assert scaler.wanted(6.0, load(1, 25)) == 1


def test_m01_replicas_are_removed_after_a_longer_time_to_the_most_that_was_needed_in_it() -> None:
    scaler = Autoscaler(LIMITS)
    assert scaler.wanted(0.0, load(3, 0)) == 3
    assert scaler.wanted(30.0, load(3, 15)) == 3
    assert scaler.wanted(60.0, load(3, 0)) == 2
    assert scaler.wanted(61.0, load(2, 0)) == 2
    assert scaler.wanted(100.0, load(2, 20)) == 2  # both were needed: the time begins anew
    assert scaler.wanted(130.0, load(2, 0)) == 2
    assert scaler.wanted(190.0, load(2, 0)) == 1
    assert scaler.wanted(900.0, load(1, 0)) == 1


def test_m03_a_replica_that_is_dead_for_good_is_replaced_at_once() -> None:
    limits = ScaleLimits(min_replicas=2, max_replicas=4, target_requests=10)
    assert Autoscaler(limits).wanted(0.0, load(1, 0)) == 2
