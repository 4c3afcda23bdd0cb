"""Storage in a bucket of S3 or of a server that speaks its protocol, by obstore.

Needs the `obstore` package (`pip install 'manyroots[stores]'`), which finds endpoint, region and
credentials in the environment (`AWS_ENDPOINT_URL`, ...), a profile or the machine's role. A value
is one object. A batch is many concurrent requests that share one deadline. The bucket's lifecycle
rules decide how long objects stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from manyroots.errors import ConfigError
from manyroots.store.backends.backend import StorageOptions, Value

_VERSION = "manyroots-1"
MAX_AT_ONCE = 32
"""Requests of one batch: more would only wait for each other's bytes."""

_T = TypeVar("_T")
_U = TypeVar("_U")


class S3:
    """Values in a bucket."""

    @classmethod
    def check(cls, url: str, options: StorageOptions) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.query or parts.username:
            raise ConfigError(
                f"--kv-storage is {url!r}; write s3://bucket/folder, and set AWS_ENDPOINT_URL and "
                "credentials in the environment."
            )
        for flag, value in (
            ("--kv-storage-size", options.max_bytes),
            ("--kv-storage-ttl-s", options.ttl_s),
        ):
            if value is not None:
                raise ConfigError(
                    f"{flag} is not for s3://; limit what a bucket keeps by its lifecycle rules."
                )
        try:
            import obstore  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "--kv-storage names a bucket, and the obstore package is missing: "
                "pip install 'manyroots[stores]'."
            ) from error

    @classmethod
    def open(cls, url: str, options: StorageOptions) -> S3:
        parts = urlsplit(url)
        return cls(parts.netloc, parts.path.strip("/"), options.timeout_s)

    def __init__(self, bucket: str, folder: str, timeout_s: float) -> None:
        import obstore
        from obstore.store import S3Store

        self._timeout_s = timeout_s
        # One loop until `close`, because answers may come after their batch has ended.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="s3", daemon=True).start()
        self._folder = f"{folder}/{_VERSION}" if folder else _VERSION
        self._ops: Any = obstore
        limit = timedelta(seconds=timeout_s)
        try:
            # The operator that names an endpoint decides whether it needs TLS. No retries: the
            # engine counts failures and tries again later.
            self._bucket: Any = S3Store(
                bucket,
                client_options={"allow_http": True, "timeout": limit, "connect_timeout": limit},
                retry_config={"max_retries": 0},
            )
        except obstore.exceptions.BaseError as error:
            reason = str(error).split("\n", 1)[0]
            raise ConfigError(
                f"--kv-storage names the bucket {bucket!r}, which can't be opened: {reason}. Check "
                "the AWS_ variables of the environment."
            ) from error

    def get(self, keys: Sequence[bytes], num_bytes: int) -> list[Value | None]:
        async def read(key: bytes) -> Value | None:
            try:
                found = await self._ops.get_async(self._bucket, self._path(key))
            except FileNotFoundError:
                return None
            if found.meta["size"] > num_bytes:
                return b""  # incomplete, so its bytes are not read
            return bytes(await found.bytes_async())

        return self._all(read, keys, None)

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        async def write(item: tuple[bytes, bytes]) -> bool:
            key, value = item
            await self._ops.put_async(self._bucket, self._path(key), value, use_multipart=False)
            return True

        return self._all(write, items, False)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        async def look(key: bytes) -> bool:
            try:
                await self._ops.head_async(self._bucket, self._path(key))
            except FileNotFoundError:
                return False
            return True

        return self._all(look, keys, False)

    def remove(self, keys: Sequence[bytes]) -> None:
        async def drop(key: bytes) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self._ops.delete_async(self._bucket, self._path(key))

        self._all(drop, keys, None)

    def keep(self, keys: Sequence[bytes], for_s: float) -> None:
        """A bucket evicts nothing by itself: only its lifecycle rules do."""

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name[2:]}"

    def _all(self, call: Callable[[_T], Awaitable[_U]], each: Sequence[_T], failed: _U) -> list[_U]:
        """Call for each, several at once. Single failures give `failed`, because a
        busy service refuses single requests; raises if all fail, or take too long."""

        async def run() -> list[_U | BaseException]:
            slots = asyncio.Semaphore(MAX_AT_ONCE)

            async def one(item: _T) -> _U:
                async with slots:
                    return await call(item)

            async with asyncio.timeout(self._timeout_s):
                return await asyncio.gather(*map(one, each), return_exceptions=True)

        try:
            ended = asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        except TimeoutError:
            raise TimeoutError(f"no answer in {self._timeout_s:g} s") from None
        errors = [one for one in ended if isinstance(one, BaseException)]
        if errors and len(errors) == len(ended):
            raise OSError(_short(errors[0]))
        return [failed if isinstance(one, BaseException) else one for one in ended]


def _short(error: BaseException) -> str:
    """The error without the object's path: keys must not be logged."""
    text = str(error).split("\n", 1)[0]
    text = re.sub(r"^Object at location \S+ not found: ", "", text)
    return re.sub(r"(https?://[^/\s]+)\S*", r"\1", text)[:300]
