"""Tiers below the device with two ranks, each a process with its own part of every page."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyroots import LLM
from manyroots.messages import SelfCheckStats
from tests.helpers.patience import PATIENCE_S
from tests.helpers.quick_tiers import quick_tiers
from tests.soaks.differential import PAGE
from tests.unit.test_llm_tiers import NUM_CACHED, ask, prompts, units_on_device
from tests.unit.test_llm_windows import serve

LINE = "stored with --tensor-parallel-size"


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_tiers():
        yield


def stored(folder: Path) -> set[Path]:
    return set((folder / "kv").glob("v1/??/*"))


def serve_stored(folder: Path, ranks: int, **settings: Any) -> LLM:
    return serve(
        folder / "model", "full", num_gpu_blocks_override=70, tensor_parallel_size=ranks,
        kv_storage=f"file://{folder / 'kv'}", kv_storage_timeout_s=PATIENCE_S, **settings,
    )  # fmt: skip


def test_t06_t15_ranks_find_their_parts_again_and_no_other_number_of_ranks_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T06, T15: two ranks compute again what one stored, which is said once. Each number of ranks
    has keys of its own, so that either engine finds its pages after a restart."""
    prompt = prompts()[0]
    with serve_stored(tmp_path, ranks=1) as llm:
        wanted, _ = ask(llm, prompt)
    of_one = stored(tmp_path)
    assert len(of_one) >= NUM_CACHED // PAGE
    for ranks, num_found in ((2, 0), (2, NUM_CACHED), (1, NUM_CACHED)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), serve_stored(tmp_path, ranks) as llm:
            assert ask(llm, prompt) == (wanted, num_found)
            assert llm.stats().total_storage_hit_tokens == num_found
        said = [record.getMessage() for record in caplog.records if LINE in record.getMessage()]
        assert len(said) == (num_found == 0)
        assert all(f"{LINE} 1; this engine has 2" in line for line in said)
        assert len(stored(tmp_path)) == 3 * len(of_one), "a file for each rank of each engine"


def test_r09_t15_pages_that_are_wrong_on_one_rank_are_dropped_on_all(tmp_path: Path) -> None:
    """R09, T15: also in storage, where each rank has its own part of them."""
    prompt = prompts()[0]
    with serve_stored(tmp_path, ranks=2, kv_check_share=1.0) as llm:
        wanted, _ = ask(llm, prompt)
        assert ask(llm, prompt) == (wanted, NUM_CACHED)
        before = stored(tmp_path)
        runner: Any = llm._loop._runner  # type: ignore[attr-defined]
        for row in units_on_device(llm, prompt):
            runner._own._arenas[0].data[row] *= -3.0
        ask(llm, prompt)
        assert llm.stats().self_check == SelfCheckStats(2, 1)
        deadline = time.monotonic() + PATIENCE_S
        while len(before & stored(tmp_path)) > len(before) - 2 * NUM_CACHED // PAGE:
            assert time.monotonic() < deadline, "a rank still stores its part"
            time.sleep(0.01)
        assert ask(llm, prompt) == (wanted, 0)
