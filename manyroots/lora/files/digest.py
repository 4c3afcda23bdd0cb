"""The content digest of an adapter, made while its bytes are read.

A tree: each MiB of data is hashed by itself, so that all cores take part, and one hash over
those in order, framed by lengths, is the digest. What is hashed is what is used: the bytes in
memory, not those on the disk a moment later.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from manyroots.ids import AdapterDigest
from manyroots.lora.files.header import Header
from manyroots.lora.files.opened import AdapterFile

CHUNK_BYTES = 1 << 20
"""Small enough for a core's own cache, and for all cores to be done at about the same time."""
_DOMAIN = b"manyroots adapter content v1"
_MAX_THREADS = 8
"""More share what hashes on most machines, and are slower together (measured)."""

Seen = Callable[[int, memoryview], None]
"""Called with each chunk's place in the data and its bytes, on the thread that has just read it.
Without memory of their own the bytes are gone when it returns."""


def read_and_hash(
    file: AdapterFile, header: Header, into: memoryview | None, seen: Seen | None = None
) -> list[bytes]:
    """Read all data of the file, into `into` if given; the hashes of its chunks."""
    scratch = threading.local()

    def chunk(start: int) -> bytes:
        length = min(CHUNK_BYTES, header.data_bytes - start)
        view = _scratch(scratch)[:length] if into is None else into[start : start + length]
        file.read_into(view, header.data_offset + start)
        hashed = hashlib.sha256(view).digest()
        if seen is not None:
            seen(start, view)
        return hashed

    starts = range(0, header.data_bytes, CHUNK_BYTES)
    if len(starts) <= 1:
        return [chunk(start) for start in starts]
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, len(starts))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-read") as threads:
        return list(threads.map(chunk, starts))


def _scratch(mine: threading.local) -> memoryview:
    """A thread's room for one chunk."""
    if not hasattr(mine, "room"):
        mine.room = memoryview(bytearray(CHUNK_BYTES))
    room: memoryview = mine.room
    return room


def content_digest(config: bytes, header: Header, chunks: Iterable[bytes]) -> AdapterDigest:
    """Of the config's canonical form, and of all bytes of the weights file."""
    whole = hashlib.sha256()
    for part in (_DOMAIN, config, header.raw):
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    whole.update(header.data_bytes.to_bytes(8, "little"))
    whole.update(CHUNK_BYTES.to_bytes(8, "little"))
    for hashed in chunks:
        whole.update(hashed)
    return AdapterDigest(whole.digest())
