"""`bench adapters`: what its cases promise about paused requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyroots.bench.adapter_slices import (
    CASES,
    ENDLESS,
    SHOWN,
    SlicesCase,
    SlicesRun,
    run_slices,
)
from manyroots.scheduler.slices import OVERDUE_STEPS, QUANTUM_STEPS


def test_the_table_has_every_figure_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_slices(["rare-adapter"], 1000)
    [run] = report["runs"]
    assert set(run["figures"]["time slices"]) == set(SHOWN)
    assert "its longest wait, steps" in capsys.readouterr().out


def test_l07_no_request_pauses_for_long_for_a_short_request_of_a_rare_adapter() -> None:
    """L07: requests of every adapter wait. The rare one does not pause after its first token, nor
    do those that made room for it lose their rows to waiting ones."""
    [case] = [case for case in CASES if case.name == "rare-adapter"]
    run = SlicesRun(replace(case, num_steps=1700))
    run.run()
    figures = run.figures()
    assert figures["rare_requests"] == 2
    assert figures["rare_wait_max"] < QUANTUM_STEPS
    assert 0 < figures["pause_max"] < QUANTUM_STEPS


class Waves(SlicesRun):
    """Each adapter in its turn asks for as many as fill all rows."""

    def run(self) -> None:
        case, rng, number = self._case, self._rng, 0
        while self._step < case.num_steps:
            while len(self._outstanding) < case.num_outstanding:
                adapter = number // case.max_num_seqs % case.num_adapters
                self._outstanding.add(self.submit(adapter, rng.randint(*case.output_len)))
                number += 1
            if self._step % case.rare_every == case.rare_every // 2:
                self.submit(case.num_adapters, case.rare_output_len)
            self.step()


@pytest.mark.parametrize(
    ("max_loras", "output_len"), [(2, (20, 200)), (3, (10, 60)), (4, (10, 60)), (4, (150, 150))]
)
def test_l06_waves_of_two_adapters_and_a_rare_third_leave_rows_in_use(
    max_loras: int, output_len: tuple[int, int]
) -> None:
    """L06: at least 0.97 of the rows that run where nothing is paused. Where all three may run, the
    rare one's first token is there in a few steps."""
    case = SlicesCase(
        "waves", 8, max_loras, 2, 16, output_len, rare_every=80, num_steps=2000,
        can_load_ahead=max_loras > 3,
    )  # fmt: skip
    sliced, endless = Waves(case), Waves(case, ENDLESS)
    sliced.run()
    endless.run()
    figures = sliced.figures()
    assert figures["mean_rows"] >= 0.97 * endless.figures()["mean_rows"]
    if max_loras > 2:
        assert figures["rare_wait_max"] <= QUANTUM_STEPS + 8
        assert figures["pause_max"] <= OVERDUE_STEPS + 2


@pytest.mark.parametrize(
    ("name", "most_steps"),
    [
        ("rare-adapter", 16), ("rare-and-long", 16), ("rare-not-ahead", 100),
        ("rare-long-not-ahead", 100),
    ],
)  # fmt: skip
def test_l06_a_rare_adapter_is_served_soon_and_others_keep_their_rows(
    name: str, most_steps: int
) -> None:
    """L06: the figures that the design states, beside an endless quantum."""
    [case] = [replace(case, num_steps=1700) for case in CASES if case.name == name]
    sliced, endless = SlicesRun(case), SlicesRun(case, ENDLESS)
    sliced.run()
    endless.run()
    assert sliced.figures()["rare_wait_max"] <= most_steps
    assert sliced.figures()["mean_rows"] >= 0.95 * endless.figures()["mean_rows"]
