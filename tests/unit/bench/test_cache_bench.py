"""`bench cache`: it runs at any size, finds exactly what is shared, and counts its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyroots.bench.cache import CacheWorkload, _slices, measure_large, measure_small
from manyroots.bench.manyroots_driver import CACHE_KINDS
from manyroots.cli.main import main

TINY = CacheWorkload(
    prompt_len=64,
    shared=0.75,
    prefixes=2,
    num_pages=64,
    page_size=4,
    num_cycles=6,
    num_large_pages=400,
)


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_under_constant_eviction_every_prefix_is_still_found(kind: str) -> None:
    figures = measure_small(TINY, kind)
    assert figures["hit_rate"] == 0.75
    assert figures["request_us"] > 0


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_the_large_pool_is_full_when_its_memory_is_counted(kind: str) -> None:
    figures = measure_large(TINY, kind)
    assert 0.9 * TINY.num_large_pages <= figures["num_cached_pages"] <= TINY.num_large_pages
    assert figures["hit_rate"] == 0.75
    assert [each["prompt_len"] for each in figures["by_length"]] == [16, 64, 256]


def test_the_report_holds_the_workload_and_both_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cache.json"
    flags = (
        "--prompt-len 64 --prefixes 2 --pages 64 --page-size 4 --cycles 5 --large-pages 300 "
        f"--json {out}"
    )
    assert main(["bench", "cache", *flags.split()]) == 0
    report = json.loads(out.read_text())
    assert report["workload"]["num_large_pages"] == 300
    for kind in CACHE_KINDS:
        assert report["small"][kind]["hit_rate"] == 0.75
        assert {"resident_mb", "bytes_per_page", "by_length"} <= set(report["large"][kind])
    told = capsys.readouterr().out
    assert "cached pages take" in told
    spread = report["small"]["plain"]["spread"]["request_us"]
    assert f"request {spread['least']:.1f} to {spread['most']:.1f} us" in told


def test_b04_a_slow_part_of_a_run_shows_in_its_spread() -> None:
    """B04: five parts, each with a median of its own."""
    seconds = [*[1e-6] * 8, *[9e-6] * 2]
    assert _slices(seconds) == {"least": pytest.approx(1.0), "most": pytest.approx(9.0)}
    assert _slices([2e-6]) == {"least": pytest.approx(2.0), "most": pytest.approx(2.0)}


def test_a_pool_too_small_for_its_prefixes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cache", "--pages", "100"]) == 2
    assert "--pages is 100" in capsys.readouterr().err
