"""What the cache gives is what was never cached: a slice of `python -m tests.differential`."""

from __future__ import annotations

import pytest

from tests.differential import MIXES, run

NUM_TRACES = 6


@pytest.mark.parametrize("mix", MIXES)
def test_cached_tokens_are_cold_tokens_for_every_mix_of_families(mix: str) -> None:
    """F01: eviction, retraction, chunks and three adapters included."""
    found = run(mix, range(NUM_TRACES))
    assert found.cached_tokens > found.prompt_tokens // 10, "hardly anything was reused"
    assert found.near_ties <= found.requests // 50
