"""Three replicas over HTTP, and a simulation of the same requests: what routing gives."""

from __future__ import annotations

import json
from pathlib import Path

from manyroots.bench.routing import (
    HIT_RATE_FACTOR,
    LOADS_SHARE,
    POINTS,
    QUEUE_RATIO,
    RoutingWorkload,
    serve,
    simulate_served,
)
from manyroots.routing.router import RoutingPolicy
from tests.helpers.tiny_adapters import TinyAdapters

WORKLOAD = RoutingWorkload(system_tokens=(20, 100), question_tokens=(10, 50), page_size=4)
OURS, ROTATED = RoutingPolicy.EXPECTED_TTFT, RoutingPolicy.ROUND_ROBIN


def test_m02_m06_g08_served_routing_reaches_its_goals_and_is_what_the_simulator_says(
    tmp_path: Path,
) -> None:
    """Pools that together hold half of the working set, and 30 adapters. Round robin is simulated
    here; `manyroots bench routing` serves it, too. So are lengths of queues: those that are served
    depend on the processor time that each replica gets beside other tests."""
    model = TinyAdapters(tmp_path / "tiny").model
    config = model / "config.json"
    values = json.loads(config.read_text()) | {"max_position_embeddings": 1024}
    config.write_text(json.dumps(values))
    engine = {"model": str(model), "dtype": "float32", "device": "cpu"}
    run = serve(WORKLOAD, engine, OURS)
    ours = run.figures
    simulated, rotated = (simulate_served(WORKLOAD, run, policy) for policy in (OURS, ROTATED))
    told = (ours, simulated, rotated)
    assert len(run.trace) == len(WORKLOAD.trace())
    assert ours.hit_rate >= HIT_RATE_FACTOR * rotated.hit_rate, told
    assert ours.adapter_loads <= LOADS_SHARE * rotated.adapter_loads, told
    assert simulated.queue_ratio <= QUEUE_RATIO, told
    assert abs(ours.hit_rate - simulated.hit_rate) <= POINTS, told
    apart = (ours.adapter_loads - simulated.adapter_loads) / rotated.adapter_loads
    assert abs(apart) <= POINTS, told
