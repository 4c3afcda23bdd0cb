"""The API process is started again when it crashes, and its parent keeps the socket (R03, R07)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.helpers.patience import PATIENCE_S

SCRIPT = """
import logging, os, socket, sys, time
from manyroots.api.supervisor import supervise
logging.basicConfig(level="INFO")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)

def serve(life):
    '''One word a connection: what the word says.'''
    listener.settimeout(0.02)
    os.set_blocking(life.orders, False)
    while True:
        try:
            told = os.read(life.orders, 1)
            return 0 if told else os._exit(9)
        except BlockingIOError:
            pass
        try:
            caller, _ = listener.accept()
        except TimeoutError:
            continue
        word = caller.recv(100).decode()
        if word == "crash":
            os.kill(os.getpid(), 11)
        if word == "end":
            return 7
        caller.sendall(f"{os.getpid()} {life.num_restarts}".encode())
        caller.close()

sys.exit(supervise(serve, max_restarts=int(sys.argv[1])))
"""


class Supervised:
    def __init__(self, max_restarts: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(max_restarts)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def say(self, word: str) -> str:
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as caller:
            caller.sendall(word.encode())
            try:
                return caller.recv(100).decode()
            except ConnectionResetError:
                return ""

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    made = Supervised(2)
    yield made
    with contextlib.suppress(ProcessLookupError):
        made.process.kill()
    made.process.wait()


def test_r07_the_socket_outlives_an_api_process_that_crashes(supervised: Supervised) -> None:
    """R07: a caller that connects meanwhile is answered by the next process."""
    pid, num_restarts = supervised.say("who").split()
    assert num_restarts == "0"
    assert supervised.say("crash") == ""
    other, num_restarts = supervised.say("who").split()
    assert (other != pid, num_restarts) == (True, "1")
    supervised.process.send_signal(signal.SIGTERM)
    code, said = supervised.end()
    assert code == 0
    assert "the API process was killed by SIGSEGV; starting it again in 0 s (1 of 2" in said
    assert "Segmentation fault" in said, "and where it was"


def test_r07_deaths_in_a_row_end_the_server_with_the_reason(supervised: Supervised) -> None:
    for _ in range(3):
        supervised.say("crash")
    code, said = supervised.end()
    assert code == 1
    assert "giving up: the API process was killed by SIGSEGV; it was started again 2 times" in said


def test_r07_an_end_of_its_own_is_the_end(supervised: Supervised) -> None:
    supervised.say("end")
    assert supervised.end()[0] == 7


def test_r07_a_signal_to_the_whole_group_counts_once(supervised: Supervised) -> None:
    """R07: as Ctrl-C in a terminal sends it; a second one would end it at once."""
    supervised.say("who")
    os.killpg(supervised.process.pid, signal.SIGINT)
    assert supervised.end()[0] == 0


def test_r07_the_api_process_ends_with_its_parent(supervised: Supervised) -> None:
    pid = int(supervised.say("who").split()[0])
    supervised.process.kill()
    supervised.process.wait()
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
            assert time.monotonic() < deadline, "the API process is still there"
            time.sleep(0.02)
