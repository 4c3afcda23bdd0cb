"""`bench table`: its commands are commands, and rows say what reports say."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyroots.bench.table import COMPILED, TableOptions, run_table
from manyroots.bench.table_rows import (
    RUNS,
    TableRow,
    TableRun,
    first_seconds,
    first_share,
    first_token_beside,
    seconds,
    share_of_time,
    slowest_first,
    start_seconds,
    warm_seconds,
)
from manyroots.cli.main import _parser, main

ROOT = Path(__file__).parents[3]
SMALL = ("--model-config", "tiny-qwen3", "--device", "cpu")


def small(name: str, what: str, *more: str) -> TableRun:
    """The rows of a run, for other arguments."""
    [run] = (run for run in RUNS if run.name == name)
    return replace(run, arguments=(what, *SMALL, *more))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_run_is_a_command_alone_and_while_it_compiles(run: TableRun) -> None:
    parser, _ = _parser()
    for more in ((), COMPILED):
        arguments = vars(parser.parse_args(["bench", *run.arguments, *more]))
        assert arguments["layers"] == (4 if more else None)


def test_a_table_has_every_row_of_its_runs_as_their_reports_say(tmp_path: Path) -> None:
    sizes = "--batch 8,64 --adapters 0,8 --prompt-len 4 --output-len 4 --repeats 2 --adapters-cold"
    decode, few = small("decode", "decode", *sizes.split()), "adapters-8"
    cold = next(run for run in RUNS if run.name == "cold-adapters").rows
    known = [row for row in decode.rows if "128" not in row.name and "256" not in row.name]
    decode = replace(decode, rows=(*known, *cold))
    load = "--case adapters-8 --with-base --load 0.7 --requests 6 --lengths 0.01 --repeats 1"
    traffic = small("mixed", "traffic", *load.split())
    shares = (share_of_time(few), slowest_first(few), seconds(few))
    rows_of_traffic = tuple(TableRow(f"row {at}", 1.0, read) for at, read in enumerate(shares))
    runs = (decode, replace(traffic, rows=rows_of_traffic))
    report = run_table(runs, TableOptions(), tmp_path)
    assert not report["failed"]
    assert not report["not_run"]
    rows = {row["row"]: row for row in report["rows"]}
    assert list(rows) == [row.name for run in runs for row in run.rows]
    found = json.loads((tmp_path / "decode.json").read_text())
    by_case = {(case["case"], case["batch"]): case for case in found["cases"]}
    base, lent = by_case["base", 64], by_case["8 adapters", 64]
    assert rows["decode, batch 64, tok/s"]["median"] == base["decode_tokens_per_s"]
    share = lent["decode_tokens_per_s"] / base["decode_tokens_per_s"]
    assert rows["8 adapters, batch 64, of base"]["median"] == pytest.approx(share)
    assert rows["first adapter from disk, s"]["median"] == found["first_token_s"]["disk"]
    [many] = json.loads((tmp_path / "mixed.json").read_text())["cases"]
    arrivals = many["poisson"]
    p99 = [arrivals[kind]["time_to_first_token_s"]["p99"]["median"] for kind in arrivals]
    assert list(arrivals) == ["with adapters", "base"]
    medians = [rows[row.name]["median"] for row in rows_of_traffic]
    assert medians == [many["share_of_base"], p99[0] / p99[1], many["seconds"]["median"]]
    for row in rows.values():
        assert 0 < row["least"] <= row["median"] * 1.0001 <= row["most"] * 1.0002


def test_rows_tell_first_runs_from_warm_ones() -> None:
    """A02: a user meets the first run, in which files are read."""

    def case(name: str, p50: float) -> dict[str, Any]:
        first = {"time_to_first_token_s": {"p50": {"median": p50}}}
        return {"case": name, "run_seconds": [16.0, 13.0, 12.0], "start_s": 40.5, **first}

    base = {"seconds": {"median": 8.0}}
    report = {"cases": [{**case("one", 0.4), "base": base}, case("other", 0.1)]}
    assert first_seconds("one")(report) == (16.0, 16.0, 16.0)
    assert warm_seconds("one")(report) == (12.5, 12.0, 13.0)
    assert first_share("one")(report) == (0.5, 0.5, 0.5)
    assert start_seconds("one")(report) == (40.5, 40.5, 40.5)
    assert first_token_beside("one", "other")(report)[0] == pytest.approx(4.0)
    report["cases"][0]["run_seconds"] = [16.0]
    assert warm_seconds("one")(report) == (16.0, 16.0, 16.0)


def test_a_run_that_fails_is_said_and_those_behind_it_run(tmp_path: Path) -> None:
    wrong = [TableRun(f"wrong {at}", ("decode", "--batch", "0"), ()) for at in range(2)]
    report = run_table(wrong, TableOptions(compile_jobs=2), tmp_path)
    assert report["failed"] == ["wrong 0", "wrong 1"]
    assert report["compile"]["exit_codes"] == {"wrong 0": 2, "wrong 1": 2}
    assert "--batch is 0" in (tmp_path / "wrong 1.log").read_text()


def test_no_run_begins_when_its_time_is_over(tmp_path: Path) -> None:
    report = run_table(RUNS, TableOptions(minutes=0.0), tmp_path)
    assert report["not_run"] == [run.name for run in RUNS]
    assert not report["rows"]


@pytest.mark.parametrize(
    ("more_is_better", "figure", "is_met", "far"),
    [(True, 10, True, 0), (True, 9, False, 0.1), (False, 10, True, 0), (False, 12, False, 0.2)],
)
def test_a_goal_is_met_from_its_own_side(
    more_is_better: bool, figure: float, is_met: bool, far: float
) -> None:
    row = TableRow("row", 10, lambda report: (0.0, 0.0, 0.0), more_is_better)
    assert row.is_met(figure) is is_met
    assert row.missed_by(figure) == pytest.approx(far)


def test_a_wrong_name_lists_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--only", "mixes"]) == 2
    said = capsys.readouterr().err
    assert "--only is 'mixes'" in said
    assert all(run.name in said for run in RUNS)


def test_goals_are_those_of_the_docs() -> None:
    """Both are written by hand, and one is looked at while the other is run."""
    lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
    begin = lines.index("| workload | goal | vLLM | manyroots | commit | command |")
    cells = [line.split("|")[2:4] for line in itertools.takewhile(bool, lines[begin:])]
    goals, theirs = ({number for cell in column for number in numbers(cell)} for column in
                     zip(*cells, strict=True))  # fmt: skip
    rows = [row for run in RUNS for row in run.rows if "p99" not in row.name]  # "twice base's"
    assert {row.goal for row in rows} <= goals
    plain = [row for row in rows if row.vllm is not None and "of base" not in row.name]
    assert {row.vllm for row in plain} <= theirs


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,.]*", text)]
