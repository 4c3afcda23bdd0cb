"""`bench host`: every part is seen, every request runs to its end, and time is counted once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from manyroots.bench.host import HOST_CASES, HostStep, _figures
from manyroots.bench.part_times import ELSEWHERE, PartTimes
from manyroots.cli.main import main


def test_every_kind_of_step_is_told_part_by_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "host.json"
    words = ["bench", "host", "--case", "adapters-32", "--requests", "12", "--repeats", "1"]
    assert main([*words, "--json", str(report)]) == 0
    [case] = json.loads(report.read_text())["cases"]
    steps = case["steps"]
    assert {"decode, up to 64 rows", "prompts, kernel by kernel"} <= set(steps)
    submits = HOST_CASES["adapters-32"].shrunk(12).submits()
    longest = max(submit.sampling.max_tokens or 0 for submit in submits)
    assert sum(figures["num_steps"] for figures in steps.values()) >= longest
    decode = steps["decode, up to 64 rows"]
    parts = {name for name, part in decode["parts_us"].items() if part["median"] > 0}
    assert parts >= {
        "plan", "launch", "inputs", "arrays", "sharing", "sampling", "packet", "tokens",
        "results", "advance", "publish", "stats", "page tables", "loads", "arrivals",
    }  # fmt: skip
    assert any("adapters" in figures["parts_us"] for figures in steps.values())
    shown = capsys.readouterr().out
    assert "decode, up to 64 rows, " in shown
    assert "packet " in shown


def test_steps_that_check_guesses_are_told_apart(tmp_path: Path) -> None:
    report = tmp_path / "host.json"
    words = ["bench", "host", "--case", "guesses-8", "--requests", "2", "--repeats", "1"]
    assert main([*words, "--json", str(report)]) == 0
    [case] = json.loads(report.read_text())["cases"]
    steps = case["steps"]["guesses checked, 2 rows"]
    assert steps["num_steps"] >= 1024 // 5
    parts = {name for name, part in steps["parts_us"].items() if part["median"] > 0}
    assert parts >= {"drafts", "settle", "checks", "launch", "packet", "results", "advance"}


def test_a_wrong_case_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--case", "nothing"]) != 0
    said = capsys.readouterr().err
    assert all(name in said for name in HOST_CASES)


def test_a_parts_time_is_its_own_without_that_of_what_it_calls() -> None:
    now = 0

    def clock() -> int:  # looking at it takes 1
        nonlocal now
        now += 1
        return now

    class Work:
        def outer(self) -> None:
            self.take(100)
            self.inner()

        def inner(self) -> None:
            self.take(5000)

        def take(self, nanoseconds: int) -> None:
            nonlocal now
            now += nanoseconds

    times, work = PartTimes(clock), Work()
    times.watch(work, ["inner"], "inner")
    times.watch(work, ["outer"], "outer")
    work.take(7)
    work.outer()
    assert times.take() == {"inner": 5000, "outer": 100, ELSEWHERE: 7}
    assert times.take().total() == 0


def test_figures_are_means_of_each_run() -> None:
    def run(*microseconds: float) -> list[HostStep]:
        return [HostStep("decode", Counter({"plan": int(us * 1e3)})) for us in microseconds]

    figures = _figures([run(1.0, 3.0), run(4.0, 6.0)], [run(2.0), run(8.0)])
    assert figures["num_steps"] == 2
    assert figures["mean_us"]["median"] == 3.5
    assert (figures["p50_us"]["least"], figures["p99_us"]["most"]) == (1.0, 6.0)
    assert figures["parts_us"]["plan"]["samples"] == [2.0, 8.0]
