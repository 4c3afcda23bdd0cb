"""Replicas in the simulator: what routing gives, and that a run repeats exactly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from manyroots.cli.main import main
from manyroots.routing.router import RoutingPolicy
from manyroots.simulate.presets import preset
from manyroots.simulate.replicas import ReplicasRun, simulate_replicas
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import simulate
from manyroots.simulate.summary import summarize
from manyroots.simulate.trace import Trace, TraceRequest, TraceSegment

COSTS = preset("h200-qwen3-8b").costs
NUM_REPLICAS = 3


def conversations(seed: int) -> Trace:
    """30 adapters, each with a system prompt; short answers, so that the test is quick."""
    rng = random.Random(seed)
    systems = [TraceSegment(f"system-{i}", rng.randint(200, 1000)) for i in range(30)]
    lines = []
    for number in range(60):
        adapter = rng.randrange(30)
        said, arrival_s = [systems[adapter]], rng.uniform(0.0, 12.0)
        for turn in range(rng.randint(2, 8)):
            said.append(TraceSegment(f"{number}/question-{turn}", rng.randint(100, 500)))
            reply = TraceSegment(f"{number}/answer-{turn}", 6)
            lines.append(
                TraceRequest(
                    arrival_s=arrival_s,
                    prompt=tuple(said),
                    adapter=f"adapter-{adapter}",
                    salt=None,
                    output_tokens=reply.length,
                    reply=reply.name,
                )
            )
            said.append(reply)
            arrival_s += rng.expovariate(1 / 2)
    return tuple(sorted(lines, key=lambda line: line.arrival_s))


TRACE = conversations(0)


def working_set_pages() -> int:
    """Of all prompts, counting what they share once."""
    longest: dict[tuple[str | None, str], int] = {}
    for line in TRACE:
        for part in line.prompt:
            assert isinstance(part, TraceSegment)
            longest[line.adapter, part.name] = part.length
    return sum(longest.values()) // 16


SETTINGS = SimulationSettings(
    num_pages=working_set_pages() // 2 // NUM_REPLICAS, max_loras=8, max_cpu_loras=16
)


def run(policy: RoutingPolicy) -> ReplicasRun:
    return simulate_replicas(
        TRACE, SETTINGS, COSTS, num_replicas=NUM_REPLICAS, policy=policy, seed=0
    )


def test_m02_m06_routing_finds_more_and_loads_less_than_round_robin() -> None:
    """Pools that together hold half of the working set."""
    ours, rotated = run(RoutingPolicy.EXPECTED_TTFT), run(RoutingPolicy.ROUND_ROBIN)
    hit_rate, rotated_rate = (summarize(found.merged).all.hit_rate for found in (ours, rotated))
    one_pool = replace(SETTINGS, num_pages=SETTINGS.num_pages * NUM_REPLICAS, max_loras=0)  # type: ignore[operator]
    one_rate = summarize(simulate(TRACE, one_pool, COSTS, seed=0)).all.hit_rate
    assert hit_rate >= min(1.5 * rotated_rate, 0.95 * one_rate), (hit_rate, rotated_rate, one_rate)
    loads, rotated_loads = (
        sum(found.merged.num_adapter_loads.values()) for found in (ours, rotated)
    )
    assert loads <= 0.3 * rotated_loads, (loads, rotated_loads)
    assert ours.queue_ratio <= 1.3
    assert len(ours.merged.records) == len(TRACE)
    again = run(RoutingPolicy.EXPECTED_TTFT)
    assert again.merged.plan_digest == ours.merged.plan_digest


def test_m06_one_replica_is_the_engine_alone() -> None:
    trace = TRACE[:60]
    alone = simulate(trace, SETTINGS, COSTS, seed=0)
    routed = simulate_replicas(
        trace, SETTINGS, COSTS, num_replicas=1, policy=RoutingPolicy.EXPECTED_TTFT, seed=0
    )
    assert summarize(routed.merged).all.hit_rate == summarize(alone).all.hit_rate


def test_m06_the_command_compares_policies(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "chat", "--num-requests", "20", "--num-pages", "600"]
    assert main([*arguments, "--replicas", "2"]) == 0
    told = capsys.readouterr().out
    assert all(policy.value in told for policy in RoutingPolicy)
    assert main([*arguments, "--replicas", "0"]) == 2
    assert "--replicas is 0" in capsys.readouterr().err
    assert main([*arguments, "--replicas", "2", "--audit"]) == 2
