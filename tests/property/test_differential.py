"""What the cache gives is what was never cached: a slice of `python -m
tests.soaks.differential`."""

from __future__ import annotations

import pytest

from tests.soaks.differential import (
    COMPRESSED_MIXES,
    INDEX_MIXES,
    LATENT_MIXES,
    MIXES,
    RECURRENT_MIXES,
    run,
)
from tests.unit.store.tiers import server_program

NUM_TRACES = 3
NUM_RECURRENT_TRACES = 2
NUM_LATENT_TRACES = 1
NUM_COMPRESSED_TRACES = 1
NUM_INDEX_TRACES = 2
NUM_RANK_TRACES = 2


@pytest.mark.parametrize("mix", MIXES)
def test_cached_tokens_are_cold_tokens_for_every_mix_of_families(mix: str) -> None:
    """F01, H13: eviction, retraction, chunks and three adapters included."""
    found = run(mix, range(NUM_TRACES))
    assert found.cached_tokens > found.prompt_tokens // 10, "hardly anything was reused"
    assert found.near_ties <= found.requests // 50


@pytest.mark.parametrize("mix", LATENT_MIXES)
def test_f07_tokens_from_latents_are_cold_tokens(mix: str) -> None:
    """F01, F07, F08, H13: the same with pages of latents, and adapters of `kv_b_proj` in prompts
    and in absorbed decode."""
    found = run(mix, range(NUM_LATENT_TRACES))
    assert found.cached_tokens > found.prompt_tokens // 10, "hardly anything was reused"
    assert found.near_ties <= found.requests // 20


@pytest.mark.parametrize("mix", COMPRESSED_MIXES)
def test_f10_tokens_from_compressed_groups_are_cold_tokens(mix: str) -> None:
    """F01, F08, F10, H13: the same with entries of groups, open groups and an index, and adapters
    of all that they are made of."""
    found = run(mix, range(NUM_COMPRESSED_TRACES))
    assert found.cached_tokens > found.prompt_tokens // 10, "hardly anything was reused"
    assert found.near_ties <= found.requests // 20


@pytest.mark.parametrize("mix", INDEX_MIXES)
def test_f10_tokens_chosen_by_an_index_are_cold_tokens(mix: str) -> None:
    """F01, F08, F10, H13: the same with latents of which queries choose a few, and adapters of the
    index."""
    found = run(mix, range(NUM_INDEX_TRACES))
    assert found.cached_tokens > found.prompt_tokens // 10, "hardly anything was reused"
    assert found.near_ties <= found.requests // 20


@pytest.mark.parametrize("mix", RECURRENT_MIXES)
def test_f05_tokens_from_checkpoints_are_cold_tokens_for_every_recurrent_mixer(mix: str) -> None:
    """F01, F05, H13: the same with states, in room for fewer checkpoints than are made."""
    found = run(mix, range(NUM_RECURRENT_TRACES))
    assert found.cached_tokens > found.prompt_tokens // 10, "hardly anything was reused"
    assert found.near_ties <= found.requests // 20


@pytest.mark.parametrize(
    ("mix", "tier"),
    [
        pytest.param("five to one", "host", marks=pytest.mark.nightly),
        pytest.param("delta nets", "redis", marks=pytest.mark.nightly),
        ("compressed groups", "files"),
    ],
)
def test_h13_t15_two_ranks_give_cold_tokens_from_every_tier(mix: str, tier: str) -> None:
    """H13, T15, F10: pages, windows, states, entries of groups and keys of an index that are
    divided over two processes and come back from a tier; from files and Redis also after a
    restart."""
    if tier == "redis" and not server_program():
        pytest.skip("no redis-server on this machine")
    found = run(mix, range(NUM_RANK_TRACES), ranks=2, tier=tier)
    assert found.host_tokens + found.storage_tokens > 0, "nothing came back from a tier"
    assert tier == "host" or found.storage_tokens > 0
    assert found.near_ties <= found.requests // 20
