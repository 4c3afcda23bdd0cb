"""What the cache gives is what was never cached: a slice of `python -m
tests.soaks.differential`."""

from __future__ import annotations

import pytest

from tests.soaks.differential import MIXES, RECURRENT_MIXES, run

NUM_TRACES = 6
NUM_RECURRENT_TRACES = 3


@pytest.mark.parametrize("mix", MIXES)
def test_cached_tokens_are_cold_tokens_for_every_mix_of_families(mix: str) -> None:
    """F01, H13: eviction, retraction, chunks and three adapters included."""
    found = run(mix, range(NUM_TRACES))
    assert found.cached_tokens > found.prompt_tokens // 10, "hardly anything was reused"
    assert found.near_ties <= found.requests // 50


@pytest.mark.parametrize("mix", RECURRENT_MIXES)
def test_f05_tokens_from_checkpoints_are_cold_tokens_for_every_recurrent_mixer(mix: str) -> None:
    """F01, F05, H13: the same with states, in room for fewer checkpoints than are made."""
    found = run(mix, range(NUM_RECURRENT_TRACES))
    assert found.cached_tokens > found.prompt_tokens // 10, "hardly anything was reused"
    assert found.near_ties <= found.requests // 20
