"""docs/requirements.md is true: every row is there once, its tests are those that carry its id, and
a row that is met has a test that drives a real engine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.reaches import Sources
from tools.docs.ledger import LEDGER as DOC
from tools.docs.ledger import ROW, STATES, Test, ids_to_tests, nightly_tests, rows

TESTS = Path(__file__).parents[1]
ROWS = {
    "N": 23,
    "L": 8,
    "W": 20,
    "P": 12,
    "H": 13,
    "C": 7,
    "T": 15,
    "K": 2,
    "S": 7,
    "R": 9,
    "F": 10,
    "Q": 4,
    "G": 11,
    "B": 5,
    "V": 7,
    "A": 7,
    "M": 6,
    "D": 5,
}
"""How many rows each section has: ids are counted from 01 and keep their meaning for ever."""

ENGINES = {
    "manyroots.LLM",
    "manyroots.llm.llm.LLM",
    "manyroots.engine.build.build_engine",
    "manyroots.runner.runner.ModelRunner",
    "manyroots.bench.tiers.run_tiers",
    "tests.e2e.conftest.Server",
    "tests.unit.test_interrupts.Terminal",
}
"""What computes with a model's real weights and pages, here or in a process of its own."""
NO_ENGINE = {
    "N10": "signatures",
    "H01": "the scheduler's sources",
    "P09": "configs as they are read, with transformers' masks beside them",
    "R01": "the simulator",
    "R02": "the oracle",
    "F02": "a model's description and what is made of it",
    "B04": "arithmetic with samples",
    "D02": "pages that are generated from code",
}
"""Rows that promise nothing of a running engine, and what they are about. Their tests show that."""

NOTE = re.compile(r"^- \*\*([A-Z]\d\d), state\*\*: \S", re.M)
"""What is missing, or where else it was shown."""


@cache
def sources() -> Sources:
    return Sources(TESTS)


@cache
def named() -> dict[str, list[Test]]:
    """Those of `make test`: a row must not depend on what only runs at night."""
    nightly = nightly_tests(TESTS)
    found = ids_to_tests(TESTS)
    return {row: [test for test in tests if test not in nightly] for row, tests in found.items()}


def drives_an_engine(files: Sources, file: str, test: str) -> bool:
    """Whether the test, a fixture or a helper of it names one of `ENGINES`, or what is in it."""
    reached = files.reached(file, test)
    return any(name == root or name.startswith(f"{root}.") for name in reached for root in ENGINES)


def wrong_states(
    ledger: Sequence[tuple[str, str]], named: dict[str, list[Test]], files: Sources
) -> list[str]:
    """Rows whose state is not what their tests run on."""
    found = []
    for row, state in ledger:
        real = [test for file, test in named.get(row, []) if drives_an_engine(files, file, test)]
        if state == "met" and not real and row not in NO_ENGINE:
            found.append(f"{row} is met, and no test of it drives a real engine: decided?")
        if state == "met" and real and row in NO_ENGINE:
            found.append(f"{row} is in NO_ENGINE, and {real[0]} drives an engine")
        if state == "decided" and real:
            found.append(f"{row} is decided, and {real[0]} drives a real engine: met, or part?")
    return found


def test_every_row_is_there_exactly_once() -> None:
    wanted = {f"{section}{n:02}" for section, last in ROWS.items() for n in range(1, last + 1)}
    # By any line that begins as a row does: one whose state is misspelt must not go unseen.
    lines = re.findall(r"^\| ([A-Z]\d\d)\b", DOC.read_text(), re.M)
    assert Counter(lines) == Counter(wanted)
    assert [row for row, _ in rows()] == lines, f"each row needs a state of {STATES}"


def test_a_cell_of_the_requirements_is_short() -> None:
    """What does not fit goes into the list below the table."""
    long = [row for row, behaviour, _ in ROW.findall(DOC.read_text()) if len(behaviour) > 130]
    assert not long


def test_d02_every_row_that_is_not_open_has_tests_and_a_part_says_what_is_missing() -> None:
    notes = set(NOTE.findall(DOC.read_text()))
    assert notes <= {row for row, _ in rows()}
    for row, state in rows():
        tests = named().get(row, [])
        assert bool(tests) == (state != "open"), f"{row} is {state} and has {tests}"
        assert state != "part" or row in notes, (
            f"{row}: what is missing? Write '- **{row}, state**: ...'"
        )


def test_a_row_is_met_only_if_a_test_it_names_drives_a_real_engine() -> None:
    assert wrong_states(rows(), named(), sources()) == []


PLANTED = {
    "conftest.py": """
import pytest
from manyroots import LLM

@pytest.fixture
def llm():
    return LLM("model")

@pytest.fixture
def fake():
    from manyroots.runner.fake import FakeRunner
    return FakeRunner()
""",
    "helpers.py": """
from manyroots.engine import build
from manyroots.llm.llm import LLM

class Engine:
    def __init__(self):
        self.loop = build.build_engine({}).loop

def started():
    return Engine()

def pages(llm: LLM) -> LLM:
    return llm
""",
    "unit/test_it.py": """
import subprocess
import pytest
import tests.helpers
from tests import helpers
from tests.helpers import pages, started

SCRIPT = '''
from manyroots import LLM
LLM("model")
'''

@pytest.fixture(name="whole")
def _whole(llm):
    return llm

@pytest.fixture
def small(fake):
    return fake

def test_fixture(llm): ...
def test_fixture_of_a_fixture(whole): ...
def test_helper(): started()
def test_attribute(): helpers.started()
def test_dotted(): tests.helpers.Engine()
@pytest.mark.usefixtures("whole")
def test_named_fixture(): ...
def test_script(): subprocess.run(["python", "-c", SCRIPT])
def test_module(): subprocess.run(["python", "-m", "tests.helpers"])

def test_fake(small): pages(small)
def test_annotation(fake: "tests.helpers.Engine") -> helpers.Engine: ...
def test_object(): assert len([1]) == 1
""",
    "other/test_that.py": """
import pytest

@pytest.fixture
def llm():
    return None

def test_fixture_of_the_same_name(llm): ...
""",
}
REAL = [
    "test_fixture", "test_fixture_of_a_fixture", "test_helper", "test_attribute", "test_dotted",
    "test_named_fixture", "test_script", "test_module",
]  # fmt: skip
UNREAL = ["test_fake", "test_annotation", "test_object"]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder = tmp_path_factory.mktemp("planted") / "tests"
    for file, text in PLANTED.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return Sources(folder)


def told(planted: Sources, row: str, state: str, *tests: str) -> list[str]:
    """Of a ledger of one row that has these tests."""
    named = {row: [("unit/test_it.py", test) for test in tests]}
    return wrong_states([(row, state)], named, planted)


@pytest.mark.parametrize("test", REAL)
def test_the_check_sees_what_drives_an_engine(planted: Sources, test: str) -> None:
    assert told(planted, "P01", "met", *UNREAL, test) == []
    [fault] = told(planted, "P01", "decided", test)
    assert fault.startswith(f"P01 is decided, and {test} drives")
    [fault] = told(planted, "N10", "met", test)
    assert fault.startswith("N10 is in NO_ENGINE")


@pytest.mark.parametrize("test", UNREAL)
def test_the_check_sees_a_row_that_is_met_on_fakes_alone(planted: Sources, test: str) -> None:
    [fault] = told(planted, "P01", "met", test)
    assert fault.startswith("P01 is met, and no test of it")
    assert told(planted, "P01", "decided", test) == told(planted, "N10", "met", test) == []


def test_the_check_takes_the_nearest_fixture(planted: Sources) -> None:
    file, test = "other/test_that.py", "test_fixture_of_the_same_name"
    assert not drives_an_engine(planted, file, test)
