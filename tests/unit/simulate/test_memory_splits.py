"""One memory for pages and adapters, beside fixed splits of it."""

from __future__ import annotations

import pytest

from manyroots.errors import ConfigError
from manyroots.simulate.memory_splits import compare_splits
from manyroots.simulate.presets import preset
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import simulate
from manyroots.simulate.synthetic import synthetic_trace

COSTS = preset("h200-qwen3-8b").costs
GIB = 2**30
SETTINGS = SimulationSettings()


@pytest.mark.parametrize(
    ("name", "num_requests", "shares", "least_gain"),
    [
        ("hot_documents", 110, (0.15,), 0.98),
        ("many_adapters", 110, (0.6,), 0.98),
        ("adapter_talks", 110, (0.3,), 0.98),
        ("adapter_scans", 180, (0.25,), 0.98),
        ("shifting", 400, (0.25,), 1.2),
    ],
)
def test_a01_one_memory_is_as_good_as_the_best_fixed_split(
    name: str, num_requests: int, shares: tuple[float, ...], least_gain: float
) -> None:
    """Small versions of what `manyroots simulate ... --memory-splits 3` compares: here with the
    share that is the best fixed one. In traffic that shifts, one memory is better."""
    trace = synthetic_trace(name, seed=0, num_requests=num_requests)
    memory = 3 * GIB
    row = compare_splits(name, trace, SETTINGS, COSTS, memory_bytes=memory, seed=0, shares=shares)
    assert row.gain >= least_gain, row


def test_a01_memory_moves_and_every_byte_is_counted() -> None:
    """Audited after every step: no byte is lost, or used by both."""
    trace = synthetic_trace("shifting", seed=1, num_requests=30)
    settings = SimulationSettings(
        num_pages=300, adapter_memory_bytes=0.25 * GIB, one_memory=True, max_model_len=2560
    )
    run = simulate(trace, settings, COSTS, seed=1, audit=True)
    assert run.num_audits > 100
    assert run.num_lent_pages > 0
    assert run.num_returned_pages > 0


def test_a01_one_memory_needs_a_size_for_adapters() -> None:
    with pytest.raises(ConfigError, match="--one-memory needs --adapter-memory"):
        SimulationSettings(num_pages=10, one_memory=True)


def test_a01_too_little_memory_is_refused() -> None:
    trace = synthetic_trace("shifting", seed=0, num_requests=12)
    with pytest.raises(ConfigError, match="Raise it"):
        compare_splits("shifting", trace, SETTINGS, COSTS, memory_bytes=GIB / 100, seed=0)
