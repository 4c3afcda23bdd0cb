"""Adapters in request bodies: written to disk as they come, unpacked, kept while they may be read.

Takes a request whose body is a tar archive of an adapter's two files; gives a folder. The disk is
written by threads, never by the event loop, and nothing of an archive is believed: only plain
members of the two names are unpacked, within their sizes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import tempfile
import weakref
from collections import deque
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from manyroots.config import LoraSettings
from manyroots.errors import RequestError, TooLargeError

CONTENT_TYPES = ("application/x-tar", "application/octet-stream")
NUM_KEPT = 4
"""Folders of one name that stay: requests of older revisions may have to read theirs again."""
MAX_CONFIG_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_OVERHEAD_BYTES = 1 << 20
"""Of an archive, beside its two files."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Uploads:
    """One server's uploads. They are deleted with it."""

    def __init__(self, lora: LoraSettings) -> None:
        self._max_bytes = int(lora.lora_max_fetch_size * (1 << 30))
        self._top = lora.cache_folder / "uploads"
        self._folder: Path | None = None
        self._published: dict[str, deque[Path]] = {}

    async def take(self, request: Request) -> Path:
        """The folder of a body's adapter; RequestError says why it is none."""
        given = request.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() not in CONTENT_TYPES:
            raise HTTPException(
                415, f"The content-type is {given[:100]!r}; send application/x-tar."
            )
        folder = await asyncio.to_thread(self._new_folder)
        try:
            archive = folder / ".archive"
            await self._write(request, archive)
            await asyncio.to_thread(_unpack, archive, folder, self._max_bytes)
        except BaseException:
            await self.discard(folder)
            raise
        return folder

    async def published(self, name: str, folder: Path | None) -> None:
        """A name has this upload's content now, or none any more."""
        kept = self._published.setdefault(name, deque())
        if folder is not None:
            kept.append(folder)
        while len(kept) > (NUM_KEPT if folder is not None else 0):
            await self.discard(kept.popleft())
        if not kept:
            del self._published[name]

    async def discard(self, folder: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, folder, True)

    def _new_folder(self) -> Path:
        if self._folder is None:
            self._top.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(dir=self._top, prefix=f"{os.getpid()}-"))
            weakref.finalize(self, shutil.rmtree, self._folder, True)
        return Path(tempfile.mkdtemp(dir=self._folder))

    async def _write(self, request: Request, archive: Path) -> None:
        most = self._max_bytes + MAX_CONFIG_BYTES + _OVERHEAD_BYTES
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise _too_large(self._max_bytes)
        size, pieces, num_waiting = 0, list[bytes](), 0
        with await asyncio.to_thread(archive.open, "xb") as file:
            try:
                async for piece in request.stream():
                    size, num_waiting = size + len(piece), num_waiting + len(piece)
                    if size > most:
                        raise _too_large(self._max_bytes)
                    pieces.append(piece)
                    if num_waiting >= _PIECE_BYTES:
                        await asyncio.to_thread(file.writelines, pieces)
                        pieces, num_waiting = [], 0
            except ClientDisconnect as error:
                raise RequestError("The body ended before its end.", field=None) from error
            await asyncio.to_thread(file.writelines, pieces)


def _unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name not in _FILES:
                    continue
                if not member.isreg():
                    raise RequestError(
                        f"{name} in the archive is a link or a device, not a file.", field=None
                    )
                if member.size > (MAX_CONFIG_BYTES if name == _FILES[0] else max_bytes):
                    raise _too_large(max_bytes)
                content = tar.extractfile(member)
                assert content is not None
                with content, (folder / name).open("xb") as file:
                    shutil.copyfileobj(content, file, _PIECE_BYTES)
    except FileExistsError as error:
        raise RequestError("The archive has one of its files twice.", field=None) from error
    except (tarfile.TarError, EOFError) as error:
        raise RequestError(
            f"The body is not a whole tar archive: {error}. Send adapter_config.json and "
            "adapter_model.safetensors as 'tar -c' writes them, uncompressed.",
            field=None,
        ) from error
    finally:
        archive.unlink(missing_ok=True)
    missing = [name for name in _FILES if not (folder / name).exists()]
    if missing:
        raise RequestError(f"The archive has no {' and no '.join(missing)} at its top.", field=None)


def _too_large(max_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"The adapter has more than {max_bytes} bytes of weights, or 1 MiB of config; raise "
        "--lora-max-fetch-size, or send a smaller one.",
        field=None,
    )
