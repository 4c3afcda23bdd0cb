"""`bench scheduler`: it runs at any size, its hit rates are exact, its report says everything."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from manyroots.bench.manyroots_driver import SchedulerDriver
from manyroots.bench.scheduler import combined, run_scheduler, table
from manyroots.bench.scheduler_cases import measure_all, measure_steady
from manyroots.bench.scheduler_trace import SchedulerWorkload
from manyroots.cli.main import main

TINY = SchedulerWorkload(
    num_requests=12,
    prompt_len=64,
    shared=0.75,
    groups=3,
    output_len=3,
    budget=96,
    batch=6,
    burst=4,
    decode_batches=(1, 4),
    waiting=(0, 5, 20),
    steady_steps=4,
)


@pytest.mark.parametrize("page_size", [4, 16])
def test_our_hit_rates_are_the_best_possible_ones(page_size: int) -> None:
    figures = measure_all(TINY, page_size, SchedulerDriver)
    assert figures["trace"]["hit_rate"] == (12 - 3) * 48 / (12 * 64)
    assert figures["trace"]["hit_rate"] == figures["trace"]["best_hit_rate"]
    burst = figures["burst"]
    assert burst["as_budgeted"]["hit_rate"] == burst["best_hit_rate"] == 3 * 48 / (4 * 64)
    assert burst["one_step"]["hit_rate"] == burst["best_hit_rate"]
    assert burst["one_step"]["num_steps_with_arrivals"] == 1


def test_heads_are_shared_in_whole_pages() -> None:
    assert TINY.shared_len(16) == 48
    assert TINY.shared_len(32) == 32
    prompts = TINY.prompts(6, 3, 32)
    assert prompts[0][:32] == prompts[3][:32]
    assert prompts[0][:32] != prompts[1][:32]
    assert prompts[0][32:] != prompts[3][32:]
    assert {len(prompt) for prompt in prompts} == {64}


def test_the_queue_stays_as_long_as_it_is_said_to_be() -> None:
    figures = measure_steady(TINY, 4, SchedulerDriver, TINY.batch, TINY.waiting)
    assert [(each["batch"], each["waiting"]) for each in figures] == [(6, 0), (6, 5), (6, 20)]
    assert all(each["plan_ms"] > 0 and each["num_steps"] >= 3 for each in figures)


def test_b04_the_median_and_the_spread_are_taken_number_by_number() -> None:
    """B04: least and most have the medians' shape."""
    found = [{"a": 1, "b": [{"c": 5}]}, {"a": 3, "b": [{"c": 1}]}, {"a": 2, "b": [{"c": 9}]}]
    assert combined(found, statistics.median) == {"a": 2, "b": [{"c": 5}]}
    assert combined(found, min) == {"a": 1, "b": [{"c": 1}]}
    assert combined(found, max) == {"a": 3, "b": [{"c": 9}]}


def test_b04_the_table_shows_the_least_and_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """B04: of every cost; hit rates are the same in all repeats."""
    costs = iter((30.0, 10.0, 20.0))
    once = measure_all(TINY, 4, SchedulerDriver)

    def measured(workload: SchedulerWorkload, page_size: int) -> dict[str, Any]:
        return {**once, "trace": {**once["trace"], "plan_us_per_request": next(costs)}}

    monkeypatch.setattr("manyroots.bench.scheduler.measure_ours", measured)
    report = run_scheduler(TINY, [4], [], 3)
    assert "20.0 [10.0-30.0]" in table(report)
    [run] = report["runs"]
    plans = [run[key]["manyroots"]["trace"]["plan_us_per_request"] for key in ("least", "most")]
    assert plans == [10.0, 30.0]


def test_the_report_holds_the_workload_and_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scheduler.json"
    flags = (
        "--requests 8 --prompt-len 64 --groups 2 --decode 2 --budget 96 --batch 4 --burst 3 "
        "--decode-batches 1,4 --waiting 3,0 --steady-steps 3 --page-size 4,16 --repeats 1"
    )
    assert main(["bench", "scheduler", *flags.split(), "--tenants", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["workload"]["num_requests"] == 8
    assert report["workload"]["waiting"] == [0, 3]
    assert report["machine"]["cores"]
    assert [run["page_size"] for run in report["runs"]] == [4, 16]
    for run in report["runs"]:
        figures = run["systems"]["manyroots"]
        assert figures["trace"]["hit_rate"] == 6 * 48 / (8 * 64)
        assert figures["trace"]["plan_us_per_request"] > 0
        assert {"plan_ms", "advance_ms", "num_steps"} <= set(figures["trace"]["prefill_step"])
        assert [each["batch"] for each in figures["decode"]] == [1, 4]
    assert "plan, us/request" in capsys.readouterr().out
    assert "manyroots" in table(report)


def test_a_folder_without_a_peer_is_refused_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scheduler", "--peer", str(tmp_path)]) == 2
    assert "pip install --no-deps --target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--requests", "0"], "--requests is 0"),
        (["--shared", "1.0"], "--shared is 1.0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--page-size", "0"], "--page-size"),
        (["--waiting", "-1"], "--waiting"),
    ],
)
def test_workloads_that_cannot_run_name_their_flag(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scheduler", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_is_driven_through_the_same_cases(tmp_path: Path) -> None:
    """A stand-in with a wheel's interface: one step per request, no reuse."""
    _install_stand_in(tmp_path)
    report = run_scheduler(TINY, [16], [tmp_path], repeats=1)
    figures = report["runs"][0]["systems"]["tokenspeed-scheduler 9.9"]
    assert figures["trace"]["hit_rate"] == 0.0
    assert figures["trace"]["best_hit_rate"] == (12 - 3) * 48 / (12 * 64)
    assert figures["burst"]["one_step"]["hit_rate"] == 0.0
    assert [each["batch"] for each in figures["waiting"]] == [6, 6, 6]


def _install_stand_in(folder: Path) -> None:
    (folder / "tokenspeed_scheduler").mkdir()
    source = Path(__file__).with_name("stand_in_wheel.py").read_text()
    (folder / "tokenspeed_scheduler" / "__init__.py").write_text(source)
    info = folder / "tokenspeed_scheduler-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tokenspeed-scheduler\nVersion: 9.9\n"
    )
