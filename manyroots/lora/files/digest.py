"""The content digest of an adapter, made while its bytes are read.

A tree: each 4 MiB of data is hashed by itself, so that all cores take part, and one hash over
those in order, framed by lengths, is the digest. What is hashed is what is used: the bytes in
memory, not those on the disk a moment later.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap

from manyroots.ids import AdapterDigest
from manyroots.lora.files.header import Header
from manyroots.lora.files.opened import AdapterFile

CHUNK_BYTES = 4 << 20
"""With less, threads wait for each other's Python more often than cores are idle at the end."""
_DOMAIN = b"manyroots adapter content v1"
_MAX_THREADS = 16
"""16 cores read 1.7 GB in 0.17 s with 16 threads and in 0.28 s with 8."""

Seen = Callable[[int, memoryview], None]
"""Called with each chunk's place in the data and its bytes, on the thread that has just read it.
Without memory of their own the bytes are gone when it returns."""


def read_and_hash(
    file: AdapterFile, header: Header, into: memoryview | None, seen: Seen | None = None
) -> list[bytes]:
    """Read all data of the file, into `into` if given; the hashes of its chunks."""
    left = deque(range(0, header.data_bytes, CHUNK_BYTES))
    hashes = [b""] * len(left)

    def work() -> None:
        # A bytearray would be filled with zeros while every other thread waits.
        room = memoryview(mmap(-1, CHUNK_BYTES) if into is None else b"")
        while (start := _first(left)) is not None:
            length = min(CHUNK_BYTES, header.data_bytes - start)
            if into is None:
                view = file.bytes_at(header.data_offset + start, room[:length])
            else:
                view = into[start : start + length]
                file.read_into(view, header.data_offset + start)
            hashes[start // CHUNK_BYTES] = hashlib.sha256(view).digest()
            if seen is not None:
                seen(start, view)

    num_threads = _num_threads(len(left))
    if num_threads <= 1:
        work()
        return hashes
    with ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-read") as threads:
        for done in [threads.submit(work) for _ in range(num_threads)]:
            done.result()
    return hashes


def _num_threads(num_chunks: int) -> int:
    """As few as need no more rounds than all would: each has as many chunks as any other."""
    most = min(_MAX_THREADS, os.cpu_count() or 1)
    num_rounds = max(1, -(-num_chunks // most))
    return -(-num_chunks // num_rounds)


def _first(left: deque[int]) -> int | None:
    """Several threads take from it, so that to look whether there is one says nothing."""
    try:
        return left.popleft()
    except IndexError:
        return None


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
