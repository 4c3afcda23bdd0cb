"""The format of a unit in storage: unique keys, and values that show whether they are complete.

A key is a digest of everything that a unit's bytes depend on: the page's hash, which stands for
model, layout, adapter, salt and all tokens up to it, then the family and the rank. A value is a
header (version, key, length, checksum) and the bytes. A value that was changed or cut short, or
that belongs to another key or version, is invalid.
"""

from __future__ import annotations

import hashlib
import struct

KEY_BYTES = 32
_DOMAIN = b"manyroots unit 1"
_MAGIC = b"MRUNIT\x00\x01"
"""The last byte is the version."""
_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQ32s")
HEADER_BYTES = _HEADER.size


def unit_key(page_hash: bytes, family: int, rank: int, num_ranks: int) -> bytes:
    fields = (_DOMAIN, page_hash, struct.pack("<III", family, rank, num_ranks))
    framed = b"".join(struct.pack("<Q", len(field)) + field for field in fields)
    return hashlib.blake2b(framed, digest_size=KEY_BYTES).digest()


def pack(key: bytes, unit: bytes) -> bytes:
    """The value to store for a unit."""
    return _HEADER.pack(_MAGIC, key, len(unit), _checksum(key, unit)) + unit


def unpack(key: bytes, value: bytes | memoryview, num_bytes: int) -> memoryview | None:
    """The unit's bytes, or None if the value is incomplete or was not stored under this key."""
    if len(value) != HEADER_BYTES + num_bytes:
        return None
    magic, named, length, checksum = _HEADER.unpack_from(value)
    unit = memoryview(value)[HEADER_BYTES:]
    if magic != _MAGIC or named != key or length != num_bytes:
        return None
    return unit if checksum == _checksum(key, unit) else None


def _checksum(key: bytes, unit: bytes | memoryview) -> bytes:
    # SHA-256, because processors have instructions for it.
    digest = hashlib.sha256(_MAGIC + key + struct.pack("<Q", len(unit)))
    digest.update(unit)
    return digest.digest()
