"""Storage in a folder: one file per value, shared by any number of servers.

A value is written to a temporary file and renamed, so that it is complete or absent even if a
process is killed. Files are in 256 folders by the first two digits of their key. If there is no
room, the least recently used are removed. A file's modification time is its last use, so that it
survives every server. For a value that is kept longer, that time is in the future until it expires
(T13).

A lock on `used` serialises writers. `used` holds the bytes of all files. It is updated before a
file is written, so that the limit holds whichever process dies, and recounted at each start.
Readers need no lock. Emptying the folder meanwhile loses only its content.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from manyroots.errors import ConfigError
from manyroots.store.backends.backend import StorageOptions, Value

logger = logging.getLogger(__name__)

_VERSION = "v1"
_BLOCK_BYTES = 4096
"""A file takes a multiple of this."""
_LOW_WATER = 0.9
"""Eviction continues down to this share of the limit, so that it is not needed for each value."""
_LOCK_WAIT_S = 2.0
_COUNT = struct.Struct("<Q")


class Files:
    """Values in a folder."""

    @classmethod
    def check(cls, url: str, options: StorageOptions) -> None:
        if not url.startswith("file:///"):
            raise ConfigError(
                f"--kv-storage is {url!r}; a folder is an absolute path, as file:///var/cache/kv."
            )
        if options.ttl_s is not None:
            raise ConfigError(
                "--kv-storage-ttl-s is for redis://; what a folder keeps is limited by "
                "--kv-storage-size."
            )

    @classmethod
    def open(cls, url: str, options: StorageOptions) -> Files:
        return cls(Path(unquote(urlsplit(url).path)), options.max_bytes)

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        """`max_bytes`: for all servers together; None: no limit."""
        self._folder = folder / _VERSION
        self._aside = self._folder / "aside"
        self._max_bytes = max_bytes
        self._used = self._folder / "used"
        self._made: set[str] = set()
        try:
            self._make_folders()
            with self._locked():
                self._tidy()
        except OSError as error:
            if not self._folder.is_dir():
                raise ConfigError(
                    f"--kv-storage names {folder}, which can't be made or read: {error}. Give a "
                    "folder that this user may write to."
                ) from error
            logger.warning("%s can't be written to, and will only be read: %s", folder, error)

    def get(self, keys: Sequence[bytes], num_bytes: int) -> list[Value | None]:
        return [self._read(self._path(key), num_bytes) for key in keys]

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        with self._locked():
            return [self._write(key, value) for key, value in items]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [_touch(self._path(key)) for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._locked():
            for key in keys:
                self._drop(self._path(key))

    def keep(self, keys: Sequence[bytes], for_s: float) -> None:
        now = time.time()
        for key in keys:
            path = self._path(key)
            with contextlib.suppress(OSError):  # missing, or another user's
                until = now if for_s == 0 else max(now + for_s, path.stat().st_mtime)
                os.utime(path, (until, until))

    def close(self) -> None:
        pass

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name[2:]

    def _read(self, path: Path, num_bytes: int) -> Value | None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):  # missing, or another user's
            return None
        try:
            value = bytearray(num_bytes + 1)
            length = 0
            with memoryview(value) as view:
                while count := os.readv(file, [view[length:]]):
                    length += count
            with contextlib.suppress(OSError):  # a read-only folder
                _note_use(file)
        finally:
            os.close(file)
        return memoryview(value)[:length]

    def _write(self, key: bytes, value: bytes) -> bool:
        path, size = self._path(key), _size(len(value))
        if not self._make_room(size):
            return False
        aside = self._aside / f"{os.getpid()}-{path.name}"
        self._count(size)
        try:
            try:
                before = self._place(aside, path, value)
            except FileNotFoundError:
                self._make_folders()
                before = self._place(aside, path, value)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
                self._count(-size)
            self._made.discard(path.parent.name)
            raise
        if before is not None:
            self._count(-_size(before))
        return True

    def _place(self, aside: Path, path: Path, value: bytes) -> int | None:
        """Write a file; returns the size of the file that it replaces."""
        if path.parent.name not in self._made:
            path.parent.mkdir(exist_ok=True)
            self._made.add(path.parent.name)
        aside.write_bytes(value)
        try:
            before = path.stat().st_size
        except FileNotFoundError:
            before = None
        aside.rename(path)
        return before

    def _make_folders(self) -> None:
        """At the start, and after they were removed."""
        self._made.clear()
        self._aside.mkdir(parents=True, exist_ok=True)

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            self._count(-_size(size))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the write lock; raises if others take too long."""
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            with self._open_used() as file:
                if _is_taken(file) and self._is_there(file):
                    yield  # closing the file releases the lock
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._used} is locked by another server")
            time.sleep(0.002)

    def _open_used(self) -> BinaryIO:
        try:
            return open(self._used, "a+b")
        except FileNotFoundError:
            self._make_folders()
            return open(self._used, "a+b")

    def _is_there(self, file: BinaryIO) -> bool:
        """Whether this is still the file that all processes lock: it may have been removed
        meanwhile."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._used.stat())
        except FileNotFoundError:
            return False

    def _count(self, change: int) -> None:
        """All files take this much more; only while locked."""
        self._note(max(0, self._num_used() + change))

    def _num_used(self) -> int:
        count = self._used.read_bytes()
        return int(_COUNT.unpack(count)[0]) if len(count) == _COUNT.size else self._scan()[1]

    def _note(self, num_bytes: int) -> None:
        with open(self._used, "r+b") as file:
            file.write(_COUNT.pack(num_bytes))

    def _make_room(self, size: int) -> bool:
        """Whether a value of this size fits, after evicting the least recently used."""
        if self._max_bytes is None:
            return True
        if self._num_used() + size <= self._max_bytes:
            return True
        if size > self._max_bytes:
            return False
        files, used = self._scan()
        wanted = max(0, min(int(_LOW_WATER * self._max_bytes), self._max_bytes - size))
        for _, length, path in sorted(files):
            if used <= wanted:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            used -= length
        self._note(used)
        return True

    def _tidy(self) -> None:
        """Remove temporary files of dead writers: no process writes now. Then count the files."""
        for path in self._aside.iterdir():
            path.unlink(missing_ok=True)
        self._note(self._scan()[1])
        self._make_room(0)

    def _scan(self) -> tuple[list[tuple[int, int, Path]], int]:
        """(last use, size, path) of every file, and the sum of sizes."""
        found = []
        for shard in os.scandir(self._folder):
            if not shard.is_dir() or len(shard.name) != 2:
                continue
            for entry in _entries(shard):
                with contextlib.suppress(FileNotFoundError):  # that file is gone
                    if entry.is_file(follow_symlinks=False):
                        stat = entry.stat()
                        found.append((stat.st_mtime_ns, _size(stat.st_size), Path(entry.path)))
        return found, sum(size for _, size, _ in found)


def _entries(folder: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """The entries of a folder; empty if it is gone meanwhile."""
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:
        return []


def _is_taken(file: BinaryIO) -> bool:
    """Lock a file, unless another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _note_use(file: int | Path) -> None:
    """Record a use now, unless the value is kept longer."""
    if os.stat(file).st_mtime <= time.time():
        os.utime(file)


def _touch(path: Path) -> bool:
    try:
        _note_use(path)
    except FileNotFoundError:
        return False
    except OSError:
        return path.exists()
    return True


def _size(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
