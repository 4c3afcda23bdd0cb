"""A process beside this one, for work that may crash, hang or take long.

Takes messages of byte strings; gives the answers of a function in the other process, one after the
other. A crash, or a job beyond its processor time or memory, costs its caller `HelperDiedError`;
the next call starts a new process. Never pickle. The other process ends with its parent.

A helper's module calls `answer_calls` when it runs as a program.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO

Message = list[bytes]

STACK_BYTES = 64 << 20
"""Of the thread that works. A caller that repeats the work has four times as much."""

_NO_MEMORY = 12


class HelperDiedError(Exception):
    """A job ended its process; the text says how."""


class HelperProcess:
    """Calls a module that runs in a process of its own. Any thread may call; one job at a time."""

    def __init__(self, module: str, greeting: Callable[[], Message] | None = None) -> None:
        """`greeting` makes the first message of each new process."""
        self._command = [sys.executable, "-m", module]
        self._greeting = greeting
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_at_exit: weakref.finalize[..., object] | None = None
        self._is_closed = False
        self.num_deaths = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def call(self, message: Message) -> Message:
        """Raises HelperDiedError if the process ends before it has answered."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # killed from outside while idle, which is no job's fault
            process = self._process or self._start()
            return self._ask(process, message)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise HelperDiedError("its helper process was closed")
        # Its stderr is the crash's own words, which any caller could fill the log with.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process = process
        self._kill_at_exit = weakref.finalize(self, process.kill)
        if self._greeting is not None:
            self._ask(process, self._greeting())
        return process

    def _ask(self, process: subprocess.Popen[bytes], message: Message) -> Message:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            send(process.stdin, message)
        answer = receive(process.stdout)
        if answer is not None:
            return answer
        code = process.wait()
        self._end()
        self.num_deaths += 1
        raise HelperDiedError(_cause(code))

    def close(self) -> None:
        """A job under way ends with HelperDiedError, and so does every later call."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # not after its job, which may take seconds
        with self._lock:
            self._end()

    def _end(self) -> None:
        """Leaves no process and no open pipe. The finalizer would keep both until exit."""
        process, self._process = self._process, None
        if process is None:
            return
        assert self._kill_at_exit is not None
        self._kill_at_exit.detach()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _cause(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "it took too much processor time"
    if code == _NO_MEMORY:
        return "it took too much memory"
    if code < 0:
        return f"it ended by {signal.Signals(-code).name}"
    return f"it ended with code {code}"


def answer_calls(handle: Callable[[Message], Message], *, cpu_s: int, memory_bytes: int) -> None:
    """Answer until the parent closes its end. Each job has `cpu_s` of processor time; all of them
    share `memory_bytes` of address space beyond what the process has at its start."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + STACK_BYTES + memory_bytes
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_run, args=(handle, cpu_s))
    worker.start()
    worker.join()


def _run(handle: Callable[[Message], Message], cpu_s: int) -> None:
    try:
        _answer(handle, cpu_s)
    except MemoryError:
        os._exit(_NO_MEMORY)
    except BaseException:
        os._exit(1)


def _answer(handle: Callable[[Message], Message], cpu_s: int) -> None:
    # Out of the way of whatever a library prints.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    while (message := receive(source)) is not None:
        soft = int(time.process_time()) + cpu_s + 1
        soft = soft if most == resource.RLIM_INFINITY else min(soft, most)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, most))
        send(sink, handle(message))


def send(file: IO[bytes], message: Message) -> None:
    sizes = struct.pack(f"<{1 + len(message)}Q", len(message), *map(len, message))
    file.write(sizes)
    for part in message:
        file.write(part)
    file.flush()


def receive(file: IO[bytes]) -> Message | None:
    """None at the end."""
    head = file.read(8)
    if len(head) < 8:
        return None
    sizes = [size for (size,) in struct.iter_unpack("<Q", file.read(8 * _number(head)))]
    parts = [file.read(size) for size in sizes]
    is_whole = len(sizes) == _number(head) and [len(part) for part in parts] == sizes
    return parts if is_whole else None


def _number(head: bytes) -> int:
    return int.from_bytes(head, "little")
