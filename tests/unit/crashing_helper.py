"""A helper process that answers, or ends as its caller says."""

from __future__ import annotations

import signal

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
    return [b"heard", *message]


if __name__ == "__main__":
    answer_calls(handle, cpu_s=1, memory_bytes=1 << 28)
