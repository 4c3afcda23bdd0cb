"""A helper process that answers, or ends as its caller says. With sockets it forks one for each."""

from __future__ import annotations

import os
import signal
import sys

from manyroots.process.forked_helpers import answer_in_forks
from manyroots.process.helper_process import Message, answer_calls


def handle(message: Message) -> Message:
    match message[0]:
        case b"crash":
            signal.raise_signal(signal.SIGSEGV)  # of this thread, so that no answer comes first
        case b"spin":
            while True:
                pass
        case b"grow":
            hoard = [bytearray(1 << 26) for _ in range(1 << 10)]
            return [str(len(hoard)).encode()]
        case b"number":
            return [str(os.getpid()).encode()]
        case b"sleep":
            signal.pause()
    return [b"heard", *message]


if __name__ == "__main__":
    if "CRASHING_HELPER_IMPORTS" in os.environ:
        signal.pause()
    if len(sys.argv) > 1:
        answer_in_forks(handle, [*map(int, sys.argv[1:])], cpu_s=1, memory_bytes=1 << 28)
    else:
        answer_calls(handle, cpu_s=1, memory_bytes=1 << 28)
