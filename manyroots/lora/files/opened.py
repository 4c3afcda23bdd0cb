"""One open file of an adapter: regular, and the same from the first byte read to the last.

Opens without following a last link and without waiting (a FIFO would wait for its writer), and
looks at what was opened, not at what the name meant a moment ago.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

from manyroots.errors import AdapterError
from manyroots.files.git_lfs import NUM_BYTES, remedy_by_bytes


class AdapterFile:
    """Reads at offsets, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            # A device may react to being opened, so the name is looked at first, too.
            self._refuse_special(os.lstat(path).st_mode)
            self._fd = os.open(path, flags)
        except OSError as error:
            raise AdapterError(
                f"{path} can't be opened: {error.strerror}. Check that it is a plain file that "
                "the server may read."
            ) from error
        try:
            self._opened = os.fstat(self._fd)
            self._refuse_special(self._opened.st_mode)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def num_bytes(self) -> int:
        return self._opened.st_size

    def read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on; a file that has become shorter is an error."""
        num_read = 0
        while num_read < len(view):
            try:
                count = os.preadv(self._fd, [view[num_read:]], offset + num_read)
            except OSError as error:
                raise AdapterError(
                    f"{self.path} can't be read: {error.strerror}. Check the disk it is on."
                ) from error
            if count == 0:
                raise self._changed()
            num_read += count

    def bytes_at(self, offset: int, room: memoryview) -> memoryview:
        """As many bytes as `room` has, from `offset` on: `room` itself, unless they are in memory
        already."""
        self.read_into(room, offset)
        return room

    def refuse_pointer(self) -> None:
        """Tell a file that was cloned without Git LFS by name, not as a damaged one."""
        first = self.read(0, min(NUM_BYTES, self.num_bytes))
        if remedy := remedy_by_bytes(first, self.path):
            raise AdapterError(f"{self.path} can't be read: {remedy}.")

    def check_unchanged(self) -> None:
        """To be called after the last read: what was read is one state of the file."""
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except OSError as error:
            raise self._changed() from error
        if not _identity(self._opened) == _identity(os.fstat(self._fd)) == _identity(named):
            raise self._changed()

    def __enter__(self) -> AdapterFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def _changed(self) -> AdapterError:
        return AdapterError(
            f"{self.path} changed while it was read; load the adapter again when its files are "
            "complete."
        )

    def _refuse_special(self, mode: int) -> None:
        if not stat.S_ISREG(mode):
            raise AdapterError(
                f"{self.path} is {_kind(mode)}, not a plain file; replace it by the file itself."
            )


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a link",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something special")
