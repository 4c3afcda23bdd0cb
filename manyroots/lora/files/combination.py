"""Several adapters with weights as one: what its content is, and where it is read from.

Takes the contents that a request names (`adapter_names.py` has how); gives a name by contents, a
digest, and a path. What it stands for is the sum of weight * scaling * B (A x) over its parts, as
PEFT's `add_weighted_adapter` with `cat` gives it. Order counts: the same parts in another order are
another content.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyroots.ids import AdapterDigest, AdapterName

_DOMAIN = b"manyroots combined adapter v1"
_PATH = "combined:"


class FoundPart(NamedTuple):
    """As the engine knows it."""

    path: str
    digest: AdapterDigest
    weight: float


def content_name(parts: Iterable[FoundPart]) -> AdapterName:
    """By contents: names may mean others later."""
    return AdapterName("+".join(f"={part.digest.hex()}*{part.weight!r}" for part in parts))


def combined_digest(parts: Iterable[tuple[AdapterDigest, float]]) -> AdapterDigest:
    whole = hashlib.sha256(_DOMAIN)
    for digest, weight in parts:
        whole.update(len(digest).to_bytes(8, "little") + digest + struct.pack("<d", weight))
    return AdapterDigest(whole.digest())


def combined_path(parts: Sequence[FoundPart]) -> str:
    """Stands for a folder where a combination is read again."""
    return _PATH + json.dumps([(part.path, part.digest.hex(), part.weight) for part in parts])


def parts_of_path(path: str) -> list[FoundPart] | None:
    """What `combined_path` has written; None for any other path."""
    if not path.startswith(_PATH):
        return None
    listed = json.loads(path.removeprefix(_PATH))
    return [FoundPart(at, AdapterDigest(bytes.fromhex(d)), weight) for at, d, weight in listed]
