"""Work in a process of its own: whatever ends it costs one call (R03)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from manyroots.process.helper_process import HelperDiedError, HelperProcess
from tests.helpers.patience import PATIENCE_S

MODULE = "tests.unit.crashing_helper"


@pytest.fixture
def helper() -> Iterator[HelperProcess]:
    made = HelperProcess(MODULE)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("job", "why"), [(b"crash", "SIGSEGV"), (b"spin", "processor time"), (b"grow", "memory")]
)
def test_r03_a_job_that_ends_its_process_fails_alone(
    helper: HelperProcess, job: bytes, why: str
) -> None:
    assert helper.call([b"a", b"x" * 300_000]) == [b"heard", b"a", b"x" * 300_000]
    with pytest.raises(HelperDiedError, match=why):
        helper.call([job])
    assert helper.call([b"b"]) == [b"heard", b"b"]
    assert helper.num_deaths == 1


def test_r03_an_idle_process_that_is_gone_is_no_callers_fault(helper: HelperProcess) -> None:
    helper.call([b"a"])
    assert helper.pid is not None
    process = helper._process
    assert process is not None
    os.kill(helper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert helper.call([b"b"]) == [b"heard", b"b"]


def test_r03_a_new_process_is_greeted_before_it_is_asked() -> None:
    helper = HelperProcess(MODULE, greeting=lambda: [b"hello"])
    assert helper.call([b"a"]) == [b"heard", b"a"]
    with pytest.raises(HelperDiedError):
        helper.call([b"crash"])
    assert helper.call([b"b"]) == [b"heard", b"b"]
    helper.close()


def test_r03_a_process_that_ended_leaves_no_open_pipe(helper: HelperProcess) -> None:
    """Ended by its job, from outside, or by `close`: a server meets such jobs for years."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HelperDiedError):
        helper.call([b"crash"])
    assert len(os.listdir("/proc/self/fd")) == before
    helper.call([b"a"])
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
    helper.call([b"b"])
    helper.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_r03_a_helper_ends_with_its_parent() -> None:
    script = (
        "from manyroots.process.helper_process import HelperProcess as H; import os\n"
        f"h = H({MODULE!r}); h.call([b'a']); print(h.pid, flush=True); os._exit(0)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    deadline = time.monotonic() + PATIENCE_S
    while _runs(int(ran.stdout)):
        assert time.monotonic() < deadline, "the helper is still there"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
