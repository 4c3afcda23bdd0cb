"""Wiring: settings reach their rooms, and those that can't work are refused at start."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from manyroots.config import EngineSettings, engine_settings
from manyroots.engine.adapter_runtime import Adaptable, adapter_limits
from manyroots.engine.build import Engine, build_engine
from manyroots.engine.memory import (
    LEAST_PAGE_BYTES,
    LIBRARY_RESERVE_BYTES,
    count_adapter_room,
)
from manyroots.errors import ConfigError
from manyroots.layers.memories import KV
from manyroots.layers.spec import AttentionSpec
from manyroots.lora.limits import MAX_OPEN_SLOTS
from manyroots.models.kernel_set import check_step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig

    folder: Path = tmp_path_factory.mktemp("tiny")
    LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def build(model: str, **settings: Any) -> Engine:
    given = {"num_gpu_blocks_override": 64, **settings}
    return build_engine(
        engine_settings({"model": model, "load_format": "dummy", "device": "cpu", **given})
    )


def test_l05_the_cap_on_adapters_comes_from_the_settings(model: str) -> None:
    """L05: --max-loras and --max-cpu-loras reach the scheduler."""
    engine = build(model, enable_lora=True, max_loras=3, max_cpu_loras=7)
    limits = engine.loop._scheduler.adapters.limits
    assert (limits.max_loras, limits.max_cpu_loras) == (3, 7)
    assert engine.info.max_loras == 3
    engine.loop.close()


@pytest.mark.parametrize(("max_cpu_loras", "expected"), [(0, MAX_OPEN_SLOTS), (7, 7)])
@pytest.mark.parametrize("asked", ["auto", 0])
def test_l05_no_cap_on_adapters_is_as_many_as_memory_holds(
    model: str,
    asked: str | int,
    max_cpu_loras: int,
    expected: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """L02, L05: --max-loras auto counts blocks of memory, as the log says, and no adapters."""
    with caplog.at_level("INFO"):
        engine = build(model, enable_lora=True, max_loras=asked, max_cpu_loras=max_cpu_loras)
    limits = engine.loop._scheduler.adapters.limits
    assert (limits.max_loras, limits.num_slots) == (0, expected)
    assert limits.blocks is not None
    assert limits.blocks.num_blocks * limits.blocks.block_bytes >= 2**28
    assert engine.info.max_loras == min(expected, 256)
    assert "in blocks of 0.06 MiB (--max-loras auto)" in caplog.text
    engine.loop.close()


@pytest.mark.parametrize("max_num_seqs", [4, 300])
def test_l02_a_step_may_have_as_many_adapters_as_rows(model: str, max_num_seqs: int) -> None:
    """L02: --max-loras is auto unless it is said; no row is left without a slot."""
    engine = build(model, enable_lora=True, max_num_seqs=max_num_seqs)
    assert engine.info.max_loras == max_num_seqs
    engine.loop.close()


@pytest.mark.parametrize(
    ("free_gib", "cache", "slot_gib", "known_gib", "expected"),
    [
        (40, {}, 0.001, 0, 5),
        (40, {}, 0.001, 6, 7.5),
        (40, {}, 0.001, 60, 10),
        (40, {}, 1, 0, 8),
        (40, {}, 2, 0, 10),
        (40, {"kv_cache_memory_bytes": 20 * 2**30}, 1, 0, 5),
        (40, {"num_gpu_blocks_override": 36 * 1024}, 0.25, 0, 1),
    ],
)
def test_memory_for_adapters_on_a_gpu_is_a_share_of_what_weights_leave(
    free_gib: int,
    cache: dict[str, int],
    slot_gib: float,
    known_gib: float,
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W06: an eighth, and up to a quarter where adapters that are known, or eight of the maximum
    rank, need it. A page is a MiB here, and a block is two."""
    free = free_gib * 2**30 + LIBRARY_RESERVE_BYTES
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 0))
    settings = engine_settings({"model": "m", "enable_lora": True, **cache})
    num_blocks = count_adapter_room(
        settings,
        slot_bytes=int(slot_gib * 2**30),
        block_bytes=2 << 20,
        known_bytes=int(known_gib * 2**30),
        page_bytes=2**20,
        device=torch.device("cuda"),
    )
    assert num_blocks * 2 == expected * 1024


@pytest.mark.parametrize(
    ("free_gib", "slot_gib", "expected"),
    [(40, 1.0, 8), (40, 2.0, 5), (40, 0.001, 256), (2, 1.0, 1)],
)
def test_where_memory_cannot_be_mapped_the_share_is_slots(
    free_gib: int, slot_gib: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least one slot: whether that fits is said when pages are counted."""
    free = free_gib * 2**30 + LIBRARY_RESERVE_BYTES
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 0))
    settings = engine_settings({"model": "m", "enable_lora": True})
    assert room(settings, slot_gib) == expected


def room(settings: EngineSettings, slot_gib: float) -> int:
    """In slots, on a GPU."""
    return count_adapter_room(
        settings,
        slot_bytes=int(slot_gib * 2**30),
        block_bytes=None,
        known_bytes=0,
        page_bytes=2**20,
        device=torch.device("cuda"),
    )


@pytest.mark.parametrize(
    ("max_loras", "max_cpu_loras", "slot_gib", "expected"),
    [(32, 0, 0.01, 40), (8, 0, 0.01, 10), (3, 0, 0.01, 3), (8, 9, 0.01, 9), (32, 0, 0.2, 34),
     (8, 0, 1.7, 8)],
)  # fmt: skip
def test_slots_to_spare_are_a_quarter_of_the_others_where_they_take_next_to_nothing(
    max_loras: int,
    max_cpu_loras: int,
    slot_gib: float,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most 1% of 40 GiB, and no more than have their copies on the host."""
    free = 40 * 2**30 + LIBRARY_RESERVE_BYTES
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 0))
    asked = {"model": "m", "enable_lora": True, "max_loras": max_loras}
    settings = engine_settings({**asked, "max_cpu_loras": max_cpu_loras})
    slots = room(settings, slot_gib)
    assert slots == expected
    limits = adapter_limits(settings.lora, slots, cast(Adaptable, None))
    assert (limits.max_loras, limits.num_slots) == (max_loras, expected)


def test_facts_for_the_door(model: str) -> None:
    engine = build(model, max_model_len=200, max_num_seqs=5)
    assert engine.info.max_model_len == 200
    assert engine.info.num_pages == 64
    assert engine.info.max_num_seqs == 5
    assert engine.info.vocab_size == 100
    assert engine.info.dtype == "float32"
    engine.loop.close()


def test_a_context_that_the_cache_cannot_hold_is_cut_when_it_was_not_asked_for(model: str) -> None:
    engine = build(model, num_gpu_blocks_override=4)
    assert engine.info.max_model_len == 64
    engine.loop.close()


@pytest.mark.parametrize("num_pages", [None, 64])
def test_a_config_without_an_end_of_positions_gets_the_context_that_memory_holds(
    model: str, num_pages: int | None, tmp_path: Path
) -> None:
    """Rows of the longest context are made at start, so it must be a number with an end."""
    config = json.loads((Path(model) / "config.json").read_text())
    endless = json.dumps({**config, "max_position_embeddings": 10**18})
    (tmp_path / "config.json").write_text(endless)
    engine = build(str(tmp_path), num_gpu_blocks_override=num_pages, max_num_seqs=4)
    assert engine.info.max_model_len <= engine.info.num_pages * engine.info.page_size
    assert num_pages is None or engine.info.max_model_len == 64 * engine.info.page_size
    engine.loop.close()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-batched-tokens"),
        ({"max_model_len": 1000}, "--max-model-len"),
        ({"max_model_len": 200, "num_gpu_blocks_override": 4}, "--num-gpu-blocks-override"),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10}, "--kv-cache-memory"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "--max-cpu-loras"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start_with_the_flag(
    settings: dict[str, Any], flag: str, model: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        build(model, **settings)


def test_all_the_bytes_that_are_given_to_pages_are_used(model: str) -> None:
    """However few rows run: the pages that they do not need are the prefix cache."""
    page_bytes = 2 * 2 * 16 * 2 * 8 * 4  # two layers, keys and values, 2 heads of 8 in float32
    given = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1000 * page_bytes + 1}
    engine = build(model, max_num_seqs=1, **given)
    assert engine.info.num_pages == 1000
    engine.loop.close()


def test_without_a_word_the_records_of_a_toy_models_pages_stay_small(model: str) -> None:
    engine = build(model, num_gpu_blocks_override=None, max_num_seqs=1)
    assert engine.info.num_pages <= 4 * 2**30 // LEAST_PAGE_BYTES
    engine.loop.close()


@pytest.mark.parametrize(
    ("kv_heads", "max_num_tokens", "max_num_rows", "flag"),
    [
        (8, 65_535, 8191, None),
        (8, 65_536, 256, "--max-num-batched-tokens is 65536"),
        (8, 65_535, 8192, "--max-num-seqs is 8192"),
        (64, 65_535, 1024, None),
        (64, 65_535, 1025, "--max-num-seqs is 1025.*at most 1024"),
    ],
)
def test_steps_that_no_launch_could_hold_are_refused_at_start(
    kv_heads: int, max_num_tokens: int, max_num_rows: int, flag: str | None
) -> None:
    """A grid's sides end at 65,535, and 65,536 counters serve rows times key-value heads."""
    attention = AttentionSpec(
        num_heads=kv_heads, memory=KV(kv_heads, 128, None), rope=0, scale=1.0, qkv_bias=False,
        o_bias=False, qk_norm=False,
    )  # fmt: skip
    spec: Any = SimpleNamespace(layers=(SimpleNamespace(mixers=(attention,)),))
    sizes = {"max_num_tokens": max_num_tokens, "max_num_rows": max_num_rows}
    with nullcontext() if flag is None else pytest.raises(ConfigError, match=flag):
        check_step(spec, torch.device("cuda"), **sizes)
    check_step(spec, torch.device("cpu"), **sizes)
