"""A real server: the default model in a process of its own, shared by the whole session."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import httpx
import openai
import pytest

from tests.helpers.patience import PATIENCE_S, cpu_seconds

API_KEY = "e2e-key"
HEADERS = {"authorization": f"Bearer {API_KEY}"}
START_LIMIT_S = 300  # the first start of all downloads the model
CONTEXT = 1024
MAX_ALIVE = 8 + 8
SETTINGS = (
    "--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", "400", "--max-num-seqs", "8",
    "--max-queued-requests", "8", "--max-num-batched-tokens", "256", "--api-key", API_KEY,
)  # fmt: skip

_FLOAT32 = ("--dtype", "float32")
"""On a chip that is fast at bfloat16, too: texts must not depend on what is computed beside."""


def children_of(pid: int) -> list[int]:
    """Of any of its threads. A thread may end while it is asked."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def command_of(pid: int) -> str:
    """Nothing for a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def pauses() -> Iterator[float]:
    """Seconds between one question and the next: each takes the processor from the server."""
    pause_s = 0.02
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, 0.25)


class Server:
    """One `manyroots serve`, started with extra flags, ended by its own pid."""

    def __init__(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        command: Sequence[str] = (sys.executable, "-m", "manyroots.cli"),
        cwd: Path | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in stop()
        self.process = subprocess.Popen(
            [*command, "serve", *_FLOAT32, "--port", "0", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
        )  # fmt: skip

    @cached_property
    def port(self) -> int:
        """Which it has chosen, as its log says."""
        deadline = time.monotonic() + START_LIMIT_S
        while not (found := re.search(r"listening on \S+:(\d+)", self.log())):
            is_alive = self.process.poll() is None and time.monotonic() < deadline
            if not is_alive and "listening on" not in self.log():
                pytest.fail(f"the server listens nowhere:\n{self.log()}")
            time.sleep(0.05)
        return int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        # Its place in the file is the server's, too, which writes there.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def status(self, path: str) -> int:
        return self.get(path).status_code

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=HEADERS, timeout=PATIENCE_S)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        for pause_s in pauses():
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log()}")
            with contextlib.suppress(httpx.TransportError):
                if self.status("/ready") == 200:
                    return
            if time.monotonic() > deadline:
                break
            time.sleep(pause_s)
        pytest.fail(f"the server was not ready in {START_LIMIT_S} s:\n{self.log()}")

    def metric(self, name: str) -> float:
        """The value of a metric that has no label but the model's name."""
        found = re.search(rf"^{name}{{model_name=[^}}]*}} (\S+)$", self.get("/metrics").text, re.M)
        assert found is not None, f"/metrics has no {name}"
        return float(found[1])

    def wait_for(self, name: str, is_good: Callable[[float], bool]) -> None:
        deadline, pause = time.monotonic() + PATIENCE_S, pauses()
        while not is_good(value := self.metric(name)):
            assert time.monotonic() < deadline, f"{name} stays {value}"
            time.sleep(next(pause))

    def wait_until_idle(self) -> None:
        """Nothing runs, and every page is given back."""
        self.wait_for("vllm:num_requests_running", lambda value: value == 0)
        self.wait_for("manyroots:pages_held", lambda value: value == 0)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0, timeout=PATIENCE_S
        )

    @property
    def api_pid(self) -> int:
        """Of the process that answers, a child of the one that was started."""
        [pid] = children_of(self.process.pid)
        return pid

    def children(self) -> list[int]:
        """Pids of the engines that the server has started: one, mostly."""
        return [pid for pid in children_of(self.api_pid) if "engine.process" in command_of(pid)]

    def cpu_seconds(self) -> float:
        """Processor time of the server and its engine so far."""
        return cpu_seconds([self.api_pid, *self.children()])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._log.close()


@contextlib.contextmanager
def running(
    *flags: str,
    env: dict[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "manyroots.cli"),
    cwd: Path | None = None,
) -> Iterator[Server]:
    server = Server(*flags, env=env, command=command, cwd=cwd)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(*SETTINGS) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="session")
def model(server: Server) -> str:
    return server.client().models.list().data[0].id


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()
