"""Files that were cloned without Git LFS: a few lines of text in place of the bytes.

Takes a path, or a file's first bytes; says whether it is such a pointer, in the words that an error
ends with.
"""

from __future__ import annotations

from pathlib import Path

_BEGINS = b"version https://git-lfs.github.com/spec/"
NUM_BYTES = len(_BEGINS)
"""As many tell a pointer."""


def remedy_of(path: Path, otherwise: str) -> str:
    """What to do about a file that can't be read; `otherwise`, unless it is a pointer."""
    try:
        with path.open("rb") as file:
            first = file.read(NUM_BYTES)
    except OSError:
        return otherwise
    return remedy_by_bytes(first, path) or otherwise


def remedy_by_bytes(first: bytes, path: Path) -> str | None:
    """The same by the `first` bytes of the file at `path`; None, unless it is a pointer."""
    if not first.startswith(_BEGINS):
        return None
    return f"it is a pointer of Git LFS and not the file itself; run git lfs pull in {path.parent}"
