"""Messages over a stream between a gateway and the router: frames with their lengths before them.

A stream, because its end says at once that the other process is gone, whatever ended it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

_COUNT = struct.Struct("<I")
_MAX_FRAMES = 16
_LIMIT_BYTES = 1 << 22
"""Read ahead; a message may be larger."""


class FrameStream:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, path: str) -> FrameStream:
        return cls(*await asyncio.open_unix_connection(path, limit=_LIMIT_BYTES))

    @staticmethod
    async def listen(path: str, take: asyncio.streams._ClientConnectedCallback) -> asyncio.Server:
        return await asyncio.start_unix_server(take, path, limit=_LIMIT_BYTES)

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand a message over. To an end that is gone it is lost, as its end will tell."""
        if not self._writer.is_closing():
            sizes = [len(frames), *map(len, frames)]
            self._writer.write(b"".join([*map(_COUNT.pack, sizes), *frames]))

    async def receive(self) -> list[bytes] | None:
        """The next message; None when the other end is gone."""
        try:
            [count] = _COUNT.unpack(await self._reader.readexactly(_COUNT.size))
            assert count <= _MAX_FRAMES
            head = await self._reader.readexactly(count * _COUNT.size)
            sizes = [size for (size,) in _COUNT.iter_unpack(head)]
            return [await self._reader.readexactly(size) for size in sizes]
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()
