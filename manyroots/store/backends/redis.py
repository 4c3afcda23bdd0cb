"""Storage in Redis or Valkey: values by key on a server, shared by all that reach it.

Needs the `redis` package (`pip install 'manyroots[redis]'`). A batch is one pipeline. The server's
own memory limit and eviction apply. With a time to live, a value expires that long after its last
use, or when its mark expires, if that is later. Redis before 7 counts from the time of writing,
because it cannot keep a later expiry.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from manyroots.errors import ConfigError
from manyroots.store.backends.backend import StorageOptions, Value

_PREFIX = b"manyroots:1:"


class Redis:
    """Values on a server."""

    @classmethod
    def check(cls, url: str, options: StorageOptions) -> None:
        if options.max_bytes is not None:
            raise ConfigError(
                "--kv-storage-size is for file://; a Redis server's memory is limited by its own "
                "maxmemory and maxmemory-policy allkeys-lru. --kv-storage-ttl-s limits age."
            )

    @classmethod
    def open(cls, url: str, options: StorageOptions) -> Redis:
        return cls(url, ttl_s=options.ttl_s, timeout_s=options.timeout_s)

    def __init__(self, url: str, *, ttl_s: int | None, timeout_s: float) -> None:
        self._ttl_s = ttl_s
        try:
            import redis
        except ImportError as error:
            raise ConfigError(
                "--kv-storage names a Redis server, and the redis package is missing: "
                "pip install 'manyroots[redis]'."
            ) from error
        password = os.environ.get("MANYROOTS_KV_STORAGE_PASSWORD")
        try:
            self._server: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                **({} if password is None else {"password": password}),
            )
        except ValueError as error:
            raise ConfigError(
                f"--kv-storage is no address of a Redis server: {error}; write "
                "redis://host:6379/0, or rediss:// for TLS."
            ) from error

    def get(self, keys: Sequence[bytes], num_bytes: int) -> list[Value | None]:
        with self._server.pipeline(transaction=False) as pipe:
            pipe.mget([_PREFIX + key for key in keys])
            if self._ttl_s is not None:
                for key in keys:
                    pipe.expire(_PREFIX + key, self._ttl_s, gt=True)
            # A read-only replica does not change the expiry of a value.
            values: list[Value | None] = _checked(pipe.execute(raise_on_error=False)[:1])[0]
        return values

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        with self._server.pipeline(transaction=False) as pipe:
            for key, value in items:
                pipe.set(_PREFIX + key, value, ex=self._ttl_s)
            answers = pipe.execute(raise_on_error=False)
        if not any(answer is True for answer in answers):
            _checked(answers)
        return [answer is True for answer in answers]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._server.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(_PREFIX + key)
            if self._ttl_s is not None:
                for key in keys:
                    pipe.expire(_PREFIX + key, self._ttl_s, gt=True)
            answers = _checked(pipe.execute(raise_on_error=False)[: len(keys)])
        return [bool(answer) for answer in answers]

    def remove(self, keys: Sequence[bytes]) -> None:
        self._server.delete(*(_PREFIX + key for key in keys))

    def keep(self, keys: Sequence[bytes], for_s: float) -> None:
        """Without a time to live the server evicts by its own rules: there is no expiry to
        change."""
        if self._ttl_s is None:
            return
        with self._server.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.expire(_PREFIX + key, max(self._ttl_s, math.ceil(for_s)), gt=for_s > 0)
            pipe.execute(raise_on_error=False)

    def close(self) -> None:
        self._server.close()


def _checked(answers: list[Any]) -> list[Any]:
    """Raises the first error, in the server's words: the package's own message would quote keys and
    values, which must not be logged."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
