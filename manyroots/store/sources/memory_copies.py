"""Writes adapters that came from memory to disk, in the background.

A revision that leaves host memory is read again from its folder. Writing takes longer than a first
token may, so the folder is named at once and filled meanwhile. The folders are removed when the
process ends.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from manyroots.lora.files.memory import MemoryAdapter

NUM_KEPT = 4
"""Folders kept per name: requests of older revisions may have to read theirs again."""


class MemoryCopies:
    """Called on any thread."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._folder: Path | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapter-copy")
        self._lock = threading.Lock()
        # Guards everything below.
        self._writing: dict[Path, Future[None]] = {}
        self._kept: dict[str, deque[Path]] = {}

    def keep(self, name: str, adapter: MemoryAdapter) -> Path:
        """Start to write an adapter; returns its folder at once."""
        with self._lock:
            if self._folder is None:
                self._top.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(dir=self._top))
                weakref.finalize(self, shutil.rmtree, self._folder, True)
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            self._writing[folder] = self._threads.submit(_write, adapter, folder)
            kept = self._kept.setdefault(name, deque())
            kept.append(folder)
            if len(kept) > NUM_KEPT:
                gone = kept.popleft()
                self._writing.pop(gone, None)
                self._threads.submit(shutil.rmtree, gone, True)
        return folder

    def wait(self, folder: Path) -> None:
        """Wait until a folder has all of its adapter; returns at once for other folders."""
        with self._lock:
            written = self._writing.get(folder)
        if written is not None:
            written.result()


def _write(adapter: MemoryAdapter, folder: Path) -> None:
    adapter.config.write(folder)
    adapter.weights.write(folder)
