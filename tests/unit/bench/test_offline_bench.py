"""`bench offline`: two clocks, which of them counts, and what token counts alone allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyroots.bench.offline import counting
from manyroots.bench.processor import BUSY, _busy_s, taken
from manyroots.cli.main import main
from tests.helpers.tiny_server import write_model


def test_both_clocks_are_given_and_the_output_says_which_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path)
    report = tmp_path / "offline.json"
    flags = (
        "--dtypes", "float32", "--num-prompts", "6", "--prompt-len", "48", "--shared-len", "32",
        "--output-len", "2", "--repeats", "1", "--adapters", "2", "--adapter-rank", "4",
        "--num-gpu-blocks-override", "128", "--json", str(report),
    )  # fmt: skip
    assert main(["bench", "offline", str(tmp_path), *flags]) == 0
    run = json.loads(report.read_text())["runs"][0]
    for case in (run, run["adapters"]):
        assert case["prompts_with_equal_tokens"] == 6
        for clock in ("wall", "processor"):
            ours, theirs = (case[side]["seconds"][clock] for side in ("manyroots", "peer"))
            assert len(ours["samples"]) == len(theirs["samples"]) == 1
            assert min(ours["least"], theirs["least"]) > 0
            ratios = case["ratio"][clock]["samples"]
            assert ratios[0] == pytest.approx(theirs["samples"][0] / ours["samples"][0], rel=0.2)
    # The head is computed once for the base model, and once more by the second adapter.
    base, adapters = (48 * 6 - case["reused_prompt_tokens"] for case in (run, run["adapters"]))
    assert base < adapters
    assert run["adapters"]["share_by_token_counts"] < 1
    shown = capsys.readouterr().out
    assert "the counts alone allow" in shown
    assert ("processor time counts" in shown) == (run["counts"] == "processor")


def test_processor_time_counts_where_others_had_a_part_of_the_machine() -> None:
    assert counting([0.0, BUSY]) == "wall"
    assert counting([None]) == "wall"
    assert counting([0.0, 2 * BUSY]) == "processor"


def test_a_pause_takes_no_processor_time(tmp_path: Path) -> None:
    import time

    with taken() as found:
        time.sleep(0.2)
    assert found.wall_s >= 0.2
    assert found.processor_s < 0.1
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 999 999 4 5 6 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert _busy_s(stat) == pytest.approx(1.65, rel=0.01)
    assert _busy_s(tmp_path / "nowhere") is None
