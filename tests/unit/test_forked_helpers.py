"""Work in several processes that are forks of one: whatever ends one costs one call (R03)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from manyroots.process.forked_helpers import ForkedHelpers
from manyroots.process.helper_process import HelperDiedError
from tests.helpers.patience import PATIENCE_S

MODULE = "tests.unit.crashing_helper"


@pytest.fixture
def helpers() -> Iterator[ForkedHelpers]:
    made = ForkedHelpers(MODULE, 2)
    yield made
    made.close()


def test_jobs_run_beside_each_other_in_processes_that_stay(helpers: ForkedHelpers) -> None:
    with ThreadPoolExecutor(3) as threads:
        numbers = [one for [one] in threads.map(helpers.call, [[b"number"]] * 8)]
    assert len(set(numbers)) <= 2
    assert str(os.getpid()).encode() not in numbers
    assert helpers.call([b"a", b"x" * 300_000]) == [b"heard", b"a", b"x" * 300_000]


@pytest.mark.parametrize("job", [b"crash", b"spin", b"grow"])
def test_r03_a_job_that_ends_its_process_fails_alone(helpers: ForkedHelpers, job: bytes) -> None:
    with pytest.raises(HelperDiedError):
        helpers.call([job])
    for _ in range(3):
        assert helpers.call([b"a"]) == [b"heard", b"a"]


def test_r03_no_call_waits_for_processes_that_have_all_ended(helpers: ForkedHelpers) -> None:
    for _ in range(2):
        with pytest.raises(HelperDiedError):
            helpers.call([b"crash"])
    for _ in range(2):
        with pytest.raises(HelperDiedError, match="all"):
            helpers.call([b"a"])


def test_r03_a_module_that_cannot_be_imported_fails_its_calls() -> None:
    helpers = ForkedHelpers("tests.unit.no_such_module", 2)
    for _ in range(3):
        with pytest.raises(HelperDiedError):
            helpers.call([b"a"])
    helpers.close()


def test_r03_closing_ends_jobs_and_leaves_no_process_and_no_open_pipe() -> None:
    before = len(os.listdir("/proc/self/fd"))
    helpers = ForkedHelpers(MODULE, 2)
    [number] = helpers.call([b"number"])
    session = os.getsid(int(number))
    ended: list[BaseException] = []
    job = threading.Thread(target=lambda: _note(ended, lambda: helpers.call([b"sleep"])))
    job.start()
    _wait_until(lambda: helpers._idle.qsize() == 1)
    helpers.close()
    job.join(PATIENCE_S)
    assert [type(error) for error in ended] == [HelperDiedError]
    assert not _of_session(session), "not even one that ended and was not waited for"
    with pytest.raises(HelperDiedError):
        helpers.call([b"a"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_r03_closing_ends_a_process_that_still_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRASHING_HELPER_IMPORTS", "for ever")
    helpers = ForkedHelpers(MODULE, 2)
    helpers.close()
    assert not _of_session(helpers.pid)


def test_r03_all_processes_end_with_their_parent_whatever_they_do() -> None:
    script = (
        "from manyroots.process.forked_helpers import ForkedHelpers as H; import os, threading\n"
        f"h = H({MODULE!r}, 2); [number] = h.call([b'number'])\n"
        "threading.Thread(target=h.call, args=([b'sleep'],), daemon=True).start()\n"
        "while h._idle.qsize() > 1: pass\n"
        "print(os.getsid(int(number)), flush=True); os.kill(os.getpid(), 9)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    _wait_until(lambda: not _of_session(int(ran.stdout), but="Z"))


def _note(errors: list[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException as error:
        errors.append(error)


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _of_session(session: int, but: str = "") -> list[int]:
    """Processes of it, whose state is not one of these."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in but:
            found.append(int(name))
    return found
