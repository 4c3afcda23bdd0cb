"""`bench http`: a server of its own beside the engine, and what it counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from manyroots.bench.cores import Cores
from manyroots.bench.http_cost import _most_open, started_server
from manyroots.cli.main import main
from manyroots.errors import ConfigError
from tests.helpers.tiny_adapters import TinyAdapters


def test_both_ways_give_every_token_and_the_ratio_is_theirs(tmp_path: Path) -> None:
    model, report = TinyAdapters(tmp_path / "tiny").model, tmp_path / "http.json"
    flags = (
        "--dtype", "float32", "--max-model-len", "64", "--num-gpu-blocks-override", "64",
        "--streams", "2,3", "--prompt-len", "5", "--output-len", "4", "--repeats", "2",
        *(("--pin",) if len(os.sched_getaffinity(0)) > 1 else ()), "--json", str(report),
    )  # fmt: skip
    assert main(["bench", "http", str(model), *flags]) == 0
    two, three = json.loads(report.read_text())["cases"]
    assert [case["streams"] for case in (two, three)] == [2, 3]
    for case in (two, three):
        assert 1 <= case["most_open_streams"] <= case["streams"]
        added = case["added_per_token"]
        assert len(added["samples"]) == 2
        ratio = case["engine_tokens_per_s"]["samples"][0] / case["http_tokens_per_s"]["samples"][0]
        assert added["samples"][0] == pytest.approx(ratio - 1, rel=0.02, abs=0.01)
        names = ("engine", "served_engine", "http")
        engine, served, http = (
            case[f"{name}_processor_us_per_token"]["samples"][0] for name in names
        )
        assert engine > 0
        for name, taken in (
            ("added_with_a_core_of_its_own", max(served, http)),
            ("added_on_one_core", served + http),
        ):
            assert case[name]["samples"][0] == pytest.approx(taken / engine - 1, rel=0.02, abs=0.01)


def test_the_process_that_answers_and_its_engine_are_measured(tmp_path: Path) -> None:
    """Not the supervisor, which does nothing."""
    model = TinyAdapters(tmp_path / "tiny").model
    settings = {
        "model": str(model), "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 64
    }  # fmt: skip
    with started_server(settings) as server:
        pids = server.pid, server.http_pid, server.engine_pid
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
        assert len(set(pids)) == 3
        assert ["engine.process" in command for command in commands] == [False, False, True]
        assert all(taken is not None and taken > 0 for taken in server.processor_s())


def test_one_core_can_not_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(ConfigError, match="--pin"):
        Cores.divided()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 7})
    assert Cores.divided() == Cores(frozenset({7}), frozenset({3, 4}))


def test_streams_are_open_together_where_they_overlap() -> None:
    assert _most_open([(0.0, 1.0), (2.0, 3.0)]) == 1
    assert _most_open([(0.0, 2.0), (1.0, 3.0), (1.5, 1.7), (2.5, 4.0)]) == 3


def test_settings_that_no_server_starts_with_are_answered_with_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "http", str(tmp_path / "nothing")]) == 2
    assert "the server did not start with these settings" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--streams", "--repeats", "--output-len"])
def test_numbers_below_one_are_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http", "model", flag, "0"]) == 2
    assert flag in capsys.readouterr().err
