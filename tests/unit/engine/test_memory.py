"""How memory becomes pages of each family of layers (F09)."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.window import SlidingWindow
from manyroots.config import EngineSettings, engine_settings
from manyroots.engine.build import layout_identity
from manyroots.engine.memory import FamilyMemory, count_pages
from manyroots.errors import ConfigError
from manyroots.layers.memories import KV
from manyroots.models.configs import complete
from manyroots.models.families import LayerFamily, families
from manyroots.models.load import describe
from manyroots.models.source import ModelSource, SourceKind

CPU = torch.device("cpu")
FULL = LayerFamily(KV(2, 64, None), tuple(range(5, 18, 6)))
WINDOW = LayerFamily(KV(2, 64, 512), tuple(i for i in range(18) if i % 6 != 5))
MIB = 2**20


def settings(**changes: Any) -> EngineSettings:
    return engine_settings(
        {"model": "none", "max_num_batched_tokens": 2048, "max_num_seqs": 64, **changes}
    )


def memory(*families: LayerFamily, **changes: Any) -> FamilyMemory:
    return FamilyMemory(settings(**changes), families, torch.bfloat16)


@pytest.mark.parametrize("window", [None, 512, 40_000])
def test_f09_one_family_gets_all_pages_that_there_is_memory_for(window: int | None) -> None:
    """F09: the numbers from before there were families to split for."""
    alone = memory(LayerFamily(KV(4, 32, window), tuple(range(16))))
    assert alone.page_bytes == 2 * 16 * 16 * 4 * 32 * 2
    given = settings(kv_cache_memory_bytes=1000 * alone.page_bytes + 7)
    num_pages = count_pages(given, alone, CPU, reserved_bytes=0, max_model_len=16_000)
    assert num_pages == 1000
    sizes = alone.fit(num_pages, 3, 16_000)
    assert (sizes.num_units, sizes.adapter_room, sizes.max_model_len) == ((1000,), 3, 16_000)


def test_f09_memory_is_split_for_all_that_a_context_needs() -> None:
    """F09: three layers of eighteen see everything. A context of 32,768 tokens takes 2048 pages of
    those, 162 of the others, and so fits into a fourth of what it would take in all layers."""
    gemma = memory(FULL, WINDOW)
    sizes = gemma.fit(520, 0, 32768)
    assert sizes.max_model_len == 32768
    full, window = sizes.num_units
    assert full >= 2048
    assert window >= 162
    assert full * 3 + window * 15 <= 520 * 18
    capacities = gemma.capacities(sizes)
    assert [capacity.family for capacity in capacities] == [
        FULL_ATTENTION,
        SlidingWindow("window-512", 512, 16),
    ]
    assert tuple(capacity.num_device_units for capacity in capacities) == sizes.num_units


def test_f09_a_context_is_cut_to_what_memory_holds_unless_it_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F09: and a window that the shorter context does not outgrow sees everything then."""
    with caplog.at_level(logging.WARNING):
        sizes = memory(FULL, WINDOW).fit(300, 0, 32768)
    assert 300 * 16 < sizes.max_model_len < 32768
    assert f"context cut from 32768 to {sizes.max_model_len} tokens" in caplog.text
    assert sizes.num_units[0] * 16 >= sizes.max_model_len
    tiny = memory(FULL, WINDOW)
    sizes = tiny.fit(20, 0, 32768)
    assert sizes.max_model_len == 320
    assert sizes.num_units == (20, 20)
    assert [c.family.name for c in tiny.capacities(sizes)] == ["full", "full-2"]
    with pytest.raises(ConfigError, match=r"--max-model-len is 32768, and the cache holds 320 "):
        memory(FULL, WINDOW, max_model_len=32768).fit(20, 0, 32768)


def test_f09_windows_alone_hold_contexts_longer_than_their_pages() -> None:
    """F09: such a model's context is no matter of memory; one without an end gets as much as if
    its layers saw everything."""
    mistral = memory(LayerFamily(KV(2, 64, 512), tuple(range(18))))
    sizes = mistral.fit(200, 0, 32768)
    assert sizes.max_model_len == 32768
    assert sizes.num_units == (200,)
    assert mistral.most_tokens(1000 * mistral.page_bytes, 10**18) == 16_000
    hybrid = memory(FULL, WINDOW)
    assert 16_000 < hybrid.most_tokens(1000 * hybrid.page_bytes, 10**18) < 6 * 16_000


def test_f09_what_each_family_got_and_why_is_told() -> None:
    """F09: for all ranks together."""
    gemma = memory(FULL, WINDOW)
    sizes = gemma.fit(1000, 0, 32768)
    full, window, why = gemma.told(sizes, num_ranks=2)
    gib = sizes.num_units[0] * FULL.unit_bytes(16, torch.bfloat16) * 2 / 2**30
    assert full.startswith(f"3 layers, full: {sizes.num_units[0]} pages, ")
    assert f"{gib:.2f} GiB" in full
    assert window.startswith(f"15 layers, window-512: {sizes.num_units[1]} pages, ")
    assert "largest share" in why
    [alone] = memory(FULL).told(memory(FULL).fit(1000, 0, 4096), num_ranks=1)
    assert alone.endswith("3.9 requests of 4096 tokens")


def test_t02_n11_layouts_that_differ_have_other_identities() -> None:
    """T02, N11: in families, windows, layers, heads, page size or type; equal ones have the same,
    so that engines can share pages."""
    families = (FULL, WINDOW)
    same = layout_identity(families, 16, torch.bfloat16)
    assert layout_identity(families, 16, torch.bfloat16) == same
    memories = [dataclasses.replace(WINDOW.memory, **change) for change in (
        {"window": 511}, {"window": None}, {"kv_heads": 1}, {"head_dim": 32},
    )]  # fmt: skip
    others = [
        layout_identity(families, 32, torch.bfloat16),
        layout_identity(families, 16, torch.float16),
        layout_identity(families[::-1], 16, torch.bfloat16),
        layout_identity((FULL,), 16, torch.bfloat16),
        layout_identity((FULL, LayerFamily(WINDOW.memory, WINDOW.layers[1:])), 16, torch.bfloat16),
        *(layout_identity((FULL, LayerFamily(m, WINDOW.layers)), 16, torch.bfloat16)
          for m in memories),
    ]  # fmt: skip
    assert len({same, *others}) == 1 + len(others)


def test_f10_a_long_request_of_compressed_groups_takes_what_its_config_implies() -> None:
    """F10: DeepSeek-V4-Flash by transformers' defaults, with 100,000 tokens: within 5% of its
    entries, its window and the open groups, and under a sixth of what full attention takes that
    keeps one vector of the same width for each token."""
    config = complete("deepseek_v4", {})
    source = ModelSource(
        kind=SourceKind.FOLDER, path=Path("nowhere"), config=config, name="flash",
        eos_token_ids=(1,), rope_factors=None,
    )  # fmt: skip
    found = memory(*families(describe(source).layers), block_size=128).request_bytes(100_000)
    kinds: list[str] = config.layer_types
    few, many = (
        kinds.count(f"{kind}_attention") for kind in ("compressed_sparse", "heavily_compressed")
    )
    assert (few, many, len(kinds)) == (20, 23, 43)
    width, index = config.head_dim, config.index_head_dim
    entries = few * 100_000 // 4 * (width + index) + many * 100_000 // 128 * width
    window = 43 * 128 * width
    open_groups = few * 8 * 4 * (width + index) + many * 128 * 2 * width
    implied = 2 * (entries + window + open_groups)
    assert implied <= found <= 1.05 * implied
    assert found < 2 * 100_000 * 43 * width / 6
