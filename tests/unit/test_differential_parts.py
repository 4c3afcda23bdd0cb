"""The long form of the differential test goes on from its file of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.soaks import differential
from tests.soaks.differential import Found, Part, main

ASK = ["--mix", "full", "--traces", "7", "--part", "3"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The parts that were run, by their first traces; the one that begins with 3 fails once."""
    firsts: list[int] = []

    def run(mix: str, seeds: range, ranks: int, tier: str) -> Found:
        firsts.append(seeds.start)
        assert firsts.count(3) != 1 or seeds.start != 3, "token 5 is 7 from the cache and 8 cold"
        return Found(mix, traces=len(seeds), tokens=10)

    monkeypatch.setattr(differential, "run", run)
    return firsts


def test_h13_results_are_kept_and_a_part_that_failed_is_run_again(
    ran: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """H13: a failure ends no other part, is no result, and is told with the exit code."""
    results = tmp_path / "results.jsonl"
    ask = [*ASK, "--results", str(results)]
    assert main(ask) == 1
    first = capsys.readouterr()
    assert "token 5 is 7 from the cache" in first.err
    assert json.loads(first.out)["traces"] == 4
    with results.open("a") as file:
        file.write('{"mix": "full", "first": 3, "en')  # the end of a run cut this line off
    assert main(ask) == 0
    total: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert ran == [0, 3, 6, 3]
    assert (total["traces"], total["tokens"]) == (7, 30)
    assert main(ask) == 0
    assert ran == [0, 3, 6, 3], "what is known is not run again"
    assert json.loads(capsys.readouterr().out) == total


def test_h13_no_part_begins_after_the_time(ran: list[int]) -> None:
    """H13: what is missing is told with the exit code."""
    assert main([*ASK, "--minutes", "-1"]) == 2
    assert not ran


def test_h13_a_part_knows_its_line() -> None:
    """H13: not those of other mixes, ranks, tiers or traces."""
    part = Part("full", 0, 3, 1, "none")
    line = {"mix": "full", "first": 0, "end": 3, "ranks": 1, "tier": "none", "traces": 3}
    assert part.is_of(line)
    for name, other in (("mix", "window"), ("end", 4), ("ranks", 2), ("tier", "redis")):
        assert not part.is_of({**line, name: other})
