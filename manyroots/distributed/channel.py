"""Whole messages over a socket between two processes of one engine.

Takes and gives byte frames. Any thread may send; one thread receives. The other side's end, however
it came, is `ClosedError`: each side notices the death of the other through the socket itself.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_HEADER = struct.Struct("<II")
"""Bytes of the first frame, bytes of the second."""


class ClosedError(Exception):
    """The other side is gone."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, kind: bytes, body: bytes) -> None:
        """One message, whole; waits while the other side is slow to take it."""
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(len(kind), len(body)) + kind + body)
        except OSError as error:
            raise ClosedError(str(error)) from error

    def receive(self) -> tuple[bytes, bytes]:
        """The next message; waits for it."""
        sizes = _HEADER.unpack(self._take(_HEADER.size))
        message = self._take(sum(sizes))
        return message[: sizes[0]], message[sizes[0] :]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other side was first
            # Wakes a thread that waits in `receive`; closing alone would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _take(self, count: int) -> bytes:
        taken = bytearray()
        while len(taken) < count:
            try:
                piece = self._socket.recv(min(count - len(taken), 1 << 20))
            except OSError as error:
                raise ClosedError(str(error)) from error
            if not piece:
                raise ClosedError("the other side closed the channel")
            taken += piece
        return bytes(taken)
