"""Helper processes that import a module once: one process imports it, and forks the others.

Takes messages and gives answers like `helper_process.py`. Several jobs run at once, one in each
process. A process that died is not replaced. All of them end with their parent.

A helper's module calls `answer_in_forks` when it runs as a program, before it has used a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

from manyroots.process.helper_process import (
    HelperDiedError,
    Message,
    answer_calls,
    receive,
    send,
)

_END_S = 2.0
"""In which the processes end by themselves, unless they still import."""


class ForkedHelpers:
    """Calls a module that runs in several processes. Any thread may call."""

    def __init__(self, module: str, count: int) -> None:
        """Returns at once; the first calls wait for the imports."""
        ours, theirs = zip(*(socket.socketpair() for _ in range(count)), strict=True)
        numbers = [end.fileno() for end in theirs]
        # Its stderr would be the words of crashes.
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = process.pid
        """Of the process that imports and forks."""
        self._lock = threading.Lock()
        self._num_alive = count
        self._idle: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        """Ends of the processes without a job; None if all have died."""
        for mine, other in zip(ours, theirs, strict=True):
            other.close()
            self._idle.put(mine)
        self._end_all = weakref.finalize(self, _end_all, process)

    def call(self, message: Message) -> Message:
        """Waits for a process without a job. Raises HelperDiedError if it ends before it has
        answered."""
        end = self._idle.get()
        if end is None:
            self._idle.put(None)  # for the next caller
            raise HelperDiedError("all helper processes have ended")
        answer = _ask(end, message)
        if answer is not None:
            self._idle.put(end)
            return answer
        end.close()
        with self._lock:
            self._num_alive -= 1
            if self._num_alive == 0:
                self._idle.put(None)
        raise HelperDiedError("its helper process ended")

    def close(self) -> None:
        """A job under way ends with HelperDiedError, and so does every later call."""
        self._end_all()
        with contextlib.suppress(queue.Empty):
            while (end := self._idle.get_nowait()) is not None:
                end.close()
        self._idle.put(None)


def _ask(end: socket.socket, message: Message) -> Message | None:
    """None if its process has died."""
    try:
        with end.makefile("wb") as sink, end.makefile("rb") as source:
            send(sink, message)
            return receive(source)
    except ConnectionError:
        return None


def _end_all(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answer_in_forks(
    handle: Callable[[Message], Message],
    sockets: Sequence[int],
    *,
    cpu_s: int,
    memory_bytes: int,
) -> None:
    """Answer at each of these, in a process of its own, until the parent ends or closes. Limits of
    each process are those of `answer_calls`."""
    gc.collect()
    gc.freeze()  # The forks share this memory while none of them touches it.
    forks = []
    for own in sockets:
        if (fork := os.fork()) == 0:
            try:
                _become(own, sockets)
                answer_calls(handle, cpu_s=cpu_s, memory_bytes=memory_bytes)
            finally:
                os._exit(0)
        forks.append(fork)
    for each in sockets:
        os.close(each)
    while os.read(0, 1):  # nothing comes before its end
        pass
    for fork in forks:
        os.kill(fork, signal.SIGKILL)
    for fork in forks:
        os.waitpid(fork, 0)


def _become(own: int, sockets: Sequence[int]) -> None:
    """A fork has its own socket alone, so that the parent notices when it has died."""
    for stream in (0, 1):
        os.dup2(own, stream)
    for each in sockets:
        os.close(each)
