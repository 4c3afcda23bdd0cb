"""Files that were cloned without Git LFS: a few lines of text in place of the bytes.

Takes a path; says whether it is such a pointer, in the words that an error ends with.
"""

from __future__ import annotations

from pathlib import Path

_BEGINS = b"version https://git-lfs.github.com/spec/"


def remedy_of(path: Path, otherwise: str) -> str:
    """What to do about a file that can't be read; `otherwise`, unless it is a pointer."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_BEGINS)) == _BEGINS
    except OSError:
        return otherwise
    if not is_pointer:
        return otherwise
    return f"it is a pointer of Git LFS and not the file itself; run git lfs pull in {path.parent}"
