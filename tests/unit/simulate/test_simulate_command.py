"""`manyroots simulate` from the command line: tables, JSON, sweeps and plots."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from manyroots.cli.main import main
from manyroots.errors import ConfigError
from manyroots.simulate.curves import Curve, Panel
from manyroots.simulate.sweep import Axis, parse_axis

SMALL = ["--num-requests", "8"]


def simulate(*flags: str) -> int:
    return main(["simulate", *flags])


@pytest.mark.parametrize("name", ["chat", "rollouts", "agents"])
def test_s05_a_made_trace_needs_no_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """S05: `manyroots simulate` says latency, throughput and hit rate, by adapter too."""
    assert simulate(name, *SMALL) == 0
    shown = capsys.readouterr().out
    for word in ("time to first token", "output tok/s", "hit rate", "adapter", "retractions"):
        assert word in shown


def test_t01_hit_rates_are_told_by_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    flags = ["--num-pages", "300", "--num-host-pages", "9000", "--max-loras", "2", "--storage"]
    assert simulate("chat", "--num-requests", "30", *flags, "--json", str(path)) == 0
    assert "hit rate by tier" in capsys.readouterr().out
    result = json.loads(path.read_text())
    summary = result["summary"]
    rates = summary["hit_rate_by_tier"]
    assert rates["host"] > 0
    assert sum(rates.values()) == pytest.approx(summary["all"]["hit_rate"])
    assert summary["num_adapter_loads"]["storage"] > 0
    assert result["settings"]["max_loras"] == 2


def test_the_same_command_writes_the_same_result(tmp_path: Path) -> None:
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        assert (
            simulate("chat", *SMALL, "--seed", "7", "--abort-requests", "0.3", "--json", str(path))
            == 0
        )
    assert paths[0].read_text() == paths[1].read_text()
    result = json.loads(paths[0].read_text())
    assert result["seed"] == 7
    assert result["settings"]["num_pages"] == 49607
    assert len(result["sequences"]) == result["summary"]["all"]["num_sequences"] == 8
    assert {"ttft_s", "num_cached_tokens", "finish_reason"} <= set(result["sequences"][0])


def test_a_written_trace_replays_as_the_made_one(tmp_path: Path) -> None:
    trace, made, read = (str(tmp_path / name) for name in ("t.jsonl", "made.json", "read.json"))
    assert simulate("agents", *SMALL, "--write-trace", trace) == 0
    assert simulate("agents", *SMALL, "--json", made) == 0
    assert simulate(trace, "--json", read) == 0
    assert Path(made).read_text() == Path(read).read_text()


def test_audit_checks_every_step(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert (
        simulate(
            "chat",
            *SMALL,
            "--num-requests",
            "3",
            "--num-pages",
            "200",
            "--audit",
            "--json",
            str(path),
        )
        == 0
    )
    summary = json.loads(path.read_text())["summary"]
    assert summary["num_audits"] >= summary["num_steps"] > 0


def test_a_sweep_compares_every_combination(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, path = tmp_path / "plot.html", tmp_path / "sweep.json"
    flags = ["--sweep", "num_pages=400,800", "--sweep", "block_size=16,32"]
    assert simulate("rollouts", *SMALL, *flags, "--plot", str(html), "--json", str(path)) == 0
    points = json.loads(path.read_text())["points"]
    assert [point["values"] for point in points] == [
        {"num_pages": pages, "block_size": size} for pages in (400, 800) for size in (16, 32)
    ]
    shown = capsys.readouterr().out
    assert "num_pages" in shown
    assert "block_size" in shown
    body = html.read_text()
    assert "http" not in body, "the plot must load nothing from anywhere"
    assert "block_size 32" in body
    drawings = body.split('<div class="panels">')[1].split("</div>")[0]
    panels = ElementTree.fromstring(f"<all>{drawings}</all>")
    assert len(panels) == 6
    assert all(len(panel.findall("polyline")) == 2 for panel in panels)


def test_costs_and_arrivals_can_be_swept_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    flags = [
        "--cost",
        "decode_row_s=0",
        "--sweep",
        "speedup=1,100",
        "--sweep",
        "step_overhead_s=0.001,0.1",
    ]
    assert simulate("chat", *SMALL, *flags, "--json", str(path)) == 0
    points = json.loads(path.read_text())["points"]
    durations = [point["summary"]["duration_s"] for point in points]
    assert durations[0] < durations[1]
    assert durations[2] < durations[0]


def test_a_png_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    plot = tmp_path / "plot.png"
    assert simulate("chat", "--sweep", "num_pages=1000", "--plot", str(plot)) == 2
    shown = capsys.readouterr()
    assert "manyroots[plot]" in shown.err
    assert shown.out == ""


def test_a_png_is_drawn_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    assert simulate("chat", *SMALL, "--sweep", "num_pages=1000,2000", "--plot", str(plot)) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere.jsonl"], "no trace file 'nowhere.jsonl'"),
        (["chat", "--preset", "h100"], "--preset is 'h100'"),
        (["chat", "--num-pages", "4"], "Raise --num-pages"),
        (["chat", "--write-back", "never"], "--write-back is 'never'"),
        (["chat", "--storage"], "give --num-host-pages"),
        (["chat", "--block-size", "3"], "--block-size is 3"),
        (["chat", "--num-requests", "0"], "--num-requests is 0"),
        (["chat", "--speedup", "0"], "--speedup is 0"),
        (["chat", "--fail-steps", "2"], "failed_steps is 2"),
        (["chat", "--cost", "decode_row_s"], "--cost is 'decode_row_s'"),
        (["chat", "--cost", "speed=1"], "no cost is called 'speed'"),
        (["chat", "--cost", "kv_memory_bytes=10"], "less than one page"),
        (["chat", "--plot", "a.html"], "--plot shows a sweep"),
        (["chat", "--sweep", "num_pages=9", "--plot", "a.svg"], "must end in .html or .png"),
        (["chat", "--sweep", "num_pages=9", "--plot", "/no/such/a.html"], "there is no folder"),
        (["chat", "--sweep", "pages=1,2"], "nothing is called 'pages'"),
        (["chat", "--sweep", "num_pages=1,x"], "'x' is not a number"),
        (["chat", "--sweep", "num_pages="], "gives no values"),
        (["chat", "--sweep", "num_pages=1,1"], "gives a value twice"),
        (["chat", "--sweep", "depth=0", "--sweep", "depth=1"], "given twice for one name"),
        (["chat", "--sweep", "speedup=0"], "a speedup must be"),
    ],
)  # fmt: skip
def test_mistakes_become_one_line_and_exit_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_axes_are_spelled_as_settings_or_as_flags() -> None:
    assert (
        parse_axis("num_pages=1, 2") == parse_axis("--num-pages=1,2") == Axis("num_pages", (1, 2))
    )
    with pytest.raises(ConfigError, match="not a number"):
        parse_axis("num_pages=1.5")


@pytest.mark.parametrize(
    ("values", "grid"),
    [
        ((0.0,), [0.0, 1.0]),
        ((0.93, 0.5), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ((1658.0,), [0, 500, 1000, 1500, 2000]),
        ((7.0, 100.0), [0, 20, 40, 60, 80, 100]),
    ],
)
def test_scales_begin_at_0_and_are_round(values: tuple[float, ...], grid: list[Any]) -> None:
    panel = Panel("t", "x", tuple("ab")[: len(values)], (Curve("", "#000", values),))
    assert panel.grid == pytest.approx(grid)
