"""Layers with windows in a real engine: what a request holds, and how memory was split for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from tests.helpers.scheduler_harness import submit
from tests.unit.models.tiny import save_tiny

TYPES = [*["sliding_attention"] * 5, "full_attention"]
WINDOW, PAGE, BUDGET, LENGTH = 16, 2, 64, 1024
"""As a window of 512, a budget of 2048 and a prompt of 32,768 tokens are to each other."""


def test_f04_f09_a_long_request_holds_a_quarter_of_what_full_attention_would(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F04, F09: at its peak, prefill included, in memory that was split for no more than that."""
    save_tiny(
        tmp_path, "gemma3", sliding_window=WINDOW, num_hidden_layers=6, layer_types=TYPES,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    given = {
        "model": str(tmp_path), "device": "cpu", "block_size": PAGE, "max_model_len": LENGTH,
        "max_num_batched_tokens": BUDGET, "max_num_seqs": 2,
        "num_gpu_blocks_override": LENGTH // PAGE // 4,
    }  # fmt: skip
    with caplog.at_level("INFO"):
        engine = build_engine(engine_settings(given))
    assert "1 layer, full: " in caplog.text
    assert f"5 layers, window-{WINDOW}: " in caplog.text
    assert "memory goes to each by the largest share" in caplog.text
    loop = engine.loop
    loop.handle(submit(1, [n % 90 + 3 for n in range(LENGTH - 8)], max_tokens=8))
    most, tokens = 0, 0
    while loop.has_work:
        tokens += sum(len(output.tokens) for output in loop.step())
        full, window = loop._scheduler._cache.stats().planes
        most = max(most, full.num_held + 5 * window.num_held)
    loop.close()
    assert tokens == 8
    assert LENGTH // PAGE < most < 0.25 * 6 * LENGTH // PAGE
