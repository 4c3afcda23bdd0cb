"""`bench adapters`: what its cases promise about those that give way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyroots.bench.adapter_turns import CASES, SHOWN, Turns, run_turns
from manyroots.scheduler.swap_costs import STAY_STEPS


def test_the_table_has_every_figure_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_turns(["rare-adapter"], 1000)
    [run] = report["runs"]
    assert set(run["figures"]["resting"]) == set(SHOWN)
    assert "its longest wait, steps" in capsys.readouterr().out


def test_l07_nobody_pauses_for_long_for_a_short_request_of_a_rare_adapter() -> None:
    """L07: with a line behind every place. Neither does the rare one pause behind its first token,
    nor do those that made room lose their rows to the line."""
    [case] = [case for case in CASES if case.name == "rare-adapter"]
    turns = Turns(replace(case, num_steps=1700), patience_steps=None)
    turns.run()
    figures = turns.figures()
    assert figures["rare_requests"] == 2
    assert figures["rare_wait_max"] < STAY_STEPS
    assert 0 < figures["pause_max"] < STAY_STEPS
