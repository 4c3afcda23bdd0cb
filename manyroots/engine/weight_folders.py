"""Finds other weights of the served model: only in folders that --weights-dirs allows.

Also detects files that changed while they were read: a trainer may write the next ones into the
same folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manyroots.errors import ConfigError, RequestError

_REMEDY = "give a folder below one of --weights-dirs"


def check_weights_dirs(folders: Sequence[str]) -> None:
    """Refuse at start folders that could never be used."""
    for folder in folders:
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(
                f"--weights-dirs has {folder!r}, which is not a folder; make it first."
            )


def find_weights(path: str, allowed: Sequence[str]) -> Path:
    """The folder that a caller's path names, with links resolved; a relative path is looked up in
    each allowed folder. The error is the same for a forbidden folder that exists and for one that
    does not."""
    roots = [Path(folder).expanduser().resolve() for folder in allowed]
    if not roots:
        raise RequestError(
            "no weights may be loaded: the server was started without --weights-dirs.", field="path"
        )
    if path and "\0" not in path:
        for root in roots:
            try:
                found = (root / path).resolve(strict=True)
            except (OSError, RuntimeError, ValueError):
                continue
            if found.is_dir() and any(found.is_relative_to(root) for root in roots):
                return found
    raise RequestError(f"path is {path!r:.200}; {_REMEDY} that exists.", field="path")


FileStates = tuple[tuple[str, int, int, int], ...]


def file_states(path: Path) -> FileStates:
    """For a file, or all files in a folder: name, number, size and time of the last change."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)
