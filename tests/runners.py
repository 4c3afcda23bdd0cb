"""Runners of small models for tests: pages for every family, and what they compute with."""

from __future__ import annotations

from typing import Any

from manyroots.models.decoder import Decoder
from manyroots.runner.runner import ModelRunner
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.arena import PageArena


def arenas_for(decoder: Decoder, *, num_pages: int, page_size: int) -> list[PageArena]:
    """As many pages for each family."""
    return [
        PageArena(
            num_pages, page_size, len(family.layers), family.memory.kv_heads,
            family.memory.head_dim, decoder.dtype, decoder.device,
        )
        for family in decoder.families
    ]  # fmt: skip


def make_runner(
    decoder: Decoder,
    loader: AdapterLoader | None = None,
    *,
    num_pages: int,
    page_size: int,
    **options: Any,
) -> ModelRunner:
    arenas = arenas_for(decoder, num_pages=num_pages, page_size=page_size)
    return ModelRunner(decoder, arenas, loader, **options)
