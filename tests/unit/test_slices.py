"""Long runs go on where they ended, count each seed once, and need nothing but numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyroots.errors import ManyrootsError
from tests.soaks.slices import (
    SEEDS_PER_SLICE,
    UNFINISHED,
    SliceFile,
    Tally,
    add_up,
    command,
    main,
    run_slices,
)

ROOT = Path(__file__).parents[2]
ran: list[int] = []
ONLY_NUMPY = """
import sys

HERE = {*sys.stdlib_module_names, "numpy", "manyroots", "tests"}

class Others:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in HERE:
            raise ModuleNotFoundError(f"not installed here: {name}", name=name)

sys.meta_path.insert(0, Others())
"""


def run_seed(seed: int) -> tuple[dict[str, int], str | None]:
    ran.append(seed)
    return {"rules": 10, "odd": seed % 2}, "planted" if seed == 33 else None


def tally_of(path: Path | None, num_seeds: int, **options: float) -> Tally:
    ran.clear()
    state = SliceFile(path, "test", 0)
    found, is_done = run_slices(
        run_seed,
        lambda tally: tally.num_seeds >= num_seeds,
        first_seed=0,
        state=state,
        **options,  # type: ignore[arg-type]
    )
    assert is_done == (found.num_seeds >= num_seeds)
    return found


def test_seeds_are_run_in_order_till_it_is_enough() -> None:
    found = tally_of(None, 45)
    assert ran == list(range(50))
    assert found.counts == {"rules": 500, "odd": 25}
    assert found.failures == {33: "planted"}
    assert str(found).startswith("seeds 0 to 49: 500 rules, 25 odd; 1 failures; ")


def test_several_processes_come_to_the_same() -> None:
    found = tally_of(None, 50, jobs=2)
    assert found.num_seeds >= 50
    assert found.counts["rules"] == 10 * found.num_seeds
    assert found.failures == {33: "planted"}


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "state"
    tally_of(path, 50)
    found = tally_of(path, 100)
    assert ran == list(range(50, 100))
    assert found.counts["rules"] == 1000
    assert found.failures == {33: "planted"}
    assert len(found.elapsed_s) == 2
    tally_of(path, 100)
    assert ran == []
    assert tally_of(path, 500, limit_s=0.0).num_seeds < 500


def test_what_was_lost_by_an_end_in_mid_write_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    tally_of(path, 100)
    header, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, lines[0], *lines[2:9], lines[9][:20]]))
    found = tally_of(path, 60)  # there are as many, but not without a gap
    assert ran == list(range(10, 20))
    assert found.counts["rules"] == 900
    assert found.num_seeds == 90


@pytest.mark.parametrize("other", ["what", "first_seed", "code"])
def test_the_file_of_another_run_is_refused(tmp_path: Path, other: str) -> None:
    path = tmp_path / "state"
    SliceFile(path, "test", 0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {other: "else"}) + "\n")
    with pytest.raises(ManyrootsError, match="--state"):
        SliceFile(path, "test", 0)


def test_the_exit_status_tells_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*argv: str) -> int:
        return command("test", run_seed, "rules", description=None, argv=list(argv))

    assert run("--rules", str(10 * SEEDS_PER_SLICE)) == 0
    assert run("--rules", "400") == 1
    assert "seed 33: planted" in capsys.readouterr().err
    assert run("--rules", "100", "--minutes", "-1") == UNFINISHED
    assert run("--rules", "100", "--limit-s", "-1") == UNFINISHED
    assert "0 of 100 rules; --state FILE would let it go on" in capsys.readouterr().err


def run_part(path: Path, first_seed: int, num_seeds: int) -> None:
    state = SliceFile(path, "test", first_seed)
    run_slices(
        run_seed, lambda tally: tally.num_seeds >= num_seeds, first_seed=first_seed, state=state
    )


def test_files_of_several_machines_add_up_and_each_seed_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, again = tmp_path / "one", tmp_path / "other", tmp_path / "again"
    run_part(one, 0, 30)
    run_part(other, 1000, 20)
    run_part(again, 10, 10)
    [total] = add_up([one, other, again]).values()
    assert total.counts == {"rules": 500, "odd": 25}
    assert main([str(one), str(other)]) == 0
    assert "seeds 0 to 29, 1000 to 1019: 500 rules, 25 odd; 0 failures" in capsys.readouterr().out
    run_part(one, 0, 40)
    assert main([str(one), str(other)]) == 1
    assert "test seed 33: planted" in capsys.readouterr().err


def test_files_of_other_code_or_another_soak_are_told_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run_part(one, 0, 10)
    header, *lines = one.read_text().splitlines(keepends=True)
    other.write_text("".join([json.dumps(json.loads(header) | {"code": "else"}), "\n", *lines]))
    assert [total.counts["rules"] for total in add_up([one, other]).values()] == [100, 100]


def test_slices_that_share_some_of_their_seeds_are_refused(tmp_path: Path) -> None:
    run_part(tmp_path / "one", 0, 10)
    run_part(tmp_path / "other", 5, 10)
    with pytest.raises(ManyrootsError, match="share seeds from 5"):
        add_up([tmp_path / "one", tmp_path / "other"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("tests.soaks.oracle_soak", "--rules", "100"),
        ("tests.soaks.engine_soak", "--steps", "100"),
    ],
)
def test_long_runs_need_nothing_but_numpy(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """They run for hours on machines that have neither a web stack nor pytest."""
    (tmp_path / "sitecustomize.py").write_text(ONLY_NUMPY)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 failures" in done.stdout
    assert done.stdout.startswith(f"{arguments[0]}: seeds 0 to ")
