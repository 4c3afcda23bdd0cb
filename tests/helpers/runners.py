"""Runners of small models for tests: pages for every family, and what they compute with."""

from __future__ import annotations

from typing import Any

from manyroots.cache.families.attention import attention_families
from manyroots.cache.families.family import Family
from manyroots.cache.families.recurrent import recurrent_families
from manyroots.models.decoder import Decoder
from manyroots.runner.runner import ModelRunner
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.arena import PageArena, StateArena


def arenas_for(decoder: Decoder, *, num_pages: int, page_size: int) -> list[PageArena | StateArena]:
    """As many units for each family."""
    return [
        family.make_arena(num_pages, page_size, decoder.dtype, decoder.device)
        for family in decoder.families
    ]


def cache_families(
    decoder: Decoder, *, page_size: int, max_len: int, interval: int
) -> list[Family]:
    """As the cache sees them; a checkpoint every `interval` pages."""
    windows = [family.window for family in decoder.families if not family.is_state]
    states = len(decoder.families) - len(windows)
    return [
        *attention_families(windows, page_size=page_size, max_model_len=max_len),
        *recurrent_families(states, interval=interval),
    ]


def make_runner(
    decoder: Decoder,
    loader: AdapterLoader | None = None,
    *,
    num_pages: int,
    page_size: int,
    **options: Any,
) -> ModelRunner:
    arenas = arenas_for(decoder, num_pages=num_pages, page_size=page_size)
    return ModelRunner(decoder, arenas, loader, page_size=page_size, **options)
