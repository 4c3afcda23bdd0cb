"""Disk cache of fetched adapters: keyed by address and state, checked by hash, limited in size.

A folder is `ADDRESS/STATE/` with the adapter's two files and a manifest of their hashes; both names
are hashes. A rename makes a complete folder visible. The least recently used folders are evicted
first. Several processes may share a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from manyroots.errors import AdapterError
from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE

FILES = (CONFIG_FILE, WEIGHTS_FILE)
MANIFEST = "manifest.json"
SOURCE = "source.json"
"""The source of a folder; stays when the folder is evicted, so that it can be fetched again."""


class DiskCache:
    """Called on any thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._in_use: Counter[Path] = Counter()
        """Guarded by the lock."""

    def holds(self, folder: Path) -> bool:
        """Whether a path belongs to this cache, whether or not it exists."""
        return folder.parent.parent == self.folder

    def find(self, address: str, state: str) -> Path | None:
        """A complete, unchanged copy, or None; a damaged copy is removed."""
        folder = self._place(address, state)
        if not folder.is_dir():
            return None
        if not self._is_whole(folder):
            self.discard(folder)
            return None
        os.utime(folder)
        return folder

    def source_of(self, folder: Path) -> str | None:
        """The address that a folder of this cache was fetched from."""
        try:
            return str(json.loads((folder.parent / SOURCE).read_text())["address"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def add(self, address: str, state: str, fill: Callable[[Path], None]) -> Path:
        """Add a folder with what `fill` writes into it; it becomes visible only when it is
        complete."""
        place = self._place(address, state)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".part-") as name:
                made = Path(name, "adapter")
                made.mkdir()
                fill(made)
                size = sum((made / file).stat().st_size for file in FILES)
                self._make_room(size, keep=place)
                hashes = {file: file_sha256(made / file) for file in FILES}
                (made / MANIFEST).write_text(json.dumps({"sha256": hashes}))
                (place.parent / SOURCE).write_text(json.dumps({"address": address}))
                self.discard(place)
                with contextlib.suppress(OSError):  # another process may have added it first
                    made.rename(place)
        except OSError as error:
            raise AdapterError(
                f"{address} could not be kept in {self.folder}: {error.strerror}. Check "
                "--lora-cache-dir and the room on its disk."
            ) from error
        return place

    def discard(self, folder: Path) -> None:
        """Remove a folder. A rename hides it before its files are deleted."""
        with contextlib.suppress(FileNotFoundError):
            gone = Path(tempfile.mkdtemp(dir=self.folder, prefix=".gone-"))
            with contextlib.suppress(FileNotFoundError):
                folder.rename(gone / "adapter")
            shutil.rmtree(gone, ignore_errors=True)

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """This process does not evict the folder meanwhile."""
        with self._lock:
            self._in_use[folder] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[folder] -= 1

    def _place(self, address: str, state: str) -> Path:
        return self.folder / _short_hash(address) / _short_hash(state)

    def _is_whole(self, folder: Path) -> bool:
        try:
            hashes = json.loads((folder / MANIFEST).read_text())["sha256"]
            return all(file_sha256(folder / file) == hashes[file] for file in FILES)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _folders(self) -> list[Path]:
        found = []
        for name in os.listdir(self.folder):
            if not name.startswith("."):
                with contextlib.suppress(OSError):
                    found += [self.folder / name / item for item in os.listdir(self.folder / name)]
        return [folder for folder in found if folder.name != SOURCE]

    def _make_room(self, size: int, keep: Path) -> None:
        if size > self._max_bytes:
            raise AdapterError(
                f"an adapter of {size} bytes is larger than the disk cache of {self._max_bytes}; "
                "raise --lora-cache-size."
            )
        with self._lock:
            found = []
            for folder in self._folders():
                with contextlib.suppress(OSError):  # another process may have removed it
                    total = sum((folder / file).stat().st_size for file in FILES)
                    found.append((folder.stat().st_mtime_ns, str(folder), total))
            left = self._max_bytes - size - sum(total for _, _, total in found)
            for _, name, total in sorted(found):
                if left >= 0:
                    break
                if Path(name) != keep and not self._in_use[Path(name)]:
                    self.discard(Path(name))
                    left += total


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
