"""`bench speculation`: both engines give the same answers, and the report has texts and ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyroots.bench.speculation import WORKLOADS
from manyroots.cli.main import main
from tests.helpers.tiny_server import write_model


def test_v06_drafts_are_timed_beside_the_same_requests_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """V06: with adapters, on every kind of text; the report says what was run."""
    write_model(tmp_path, 1024)
    report = tmp_path / "speculation.json"
    config = '{"method": "suffix", "num_speculative_tokens": 3, "adaptive": false}'
    flags = (
        "--dtype", "float32", "--output-len", "12", "--repeats", "1", "--adapters", "2",
        "--adapter-rank", "4", "--num-gpu-blocks-override", "256", "--max-num-seqs", "2",
        "--speculative-config", config, "--json", str(report),
    )  # fmt: skip
    assert main(["bench", "speculation", str(tmp_path), *flags]) == 0
    told = json.loads(report.read_text())
    assert told["workload"]["config"]["num_speculative_tokens"] == 3
    assert told["texts"][0]["prompts"] == list(WORKLOADS[0].prompts)
    assert [run["workload"] for run in told["runs"]] == [one.name for one in WORKLOADS]
    for run in told["runs"]:
        assert run["answers_with_equal_tokens"] == run["answers"] == 2
        assert run["output_tokens"] == 2 * 12
        assert run["speedup"]["processor"]["median"] > 0
    assert sum(run["drafted_tokens"] for run in told["runs"]) > 0
    assert capsys.readouterr().out.count("answers equal") == len(WORKLOADS)


def test_v06_a_config_that_is_not_served_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """V06."""
    arguments = ["bench", "speculation", "--speculative-config", '{"method": "eagle"}']
    assert main(arguments) == 2
    assert "has method 'eagle'" in capsys.readouterr().err
