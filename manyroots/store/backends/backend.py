"""What a storage backend is: values by key, in batches. Plug-ins implement these protocols (T14).

Takes keys of 32 bytes and values of any; returns them as they were, or not at all. The caller
checks whether a value is whole. An operation that fails raises, within `StorageOptions.timeout_s`
where the backend can ensure that; the caller's own limit ends a copy in any case. Several threads
call at once.

docs/how-to/add-a-storage-backend.md has an example, and `python -m manyroots.store.conformance URL`
checks a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Value = bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """What flags say about storage, whatever its kind."""

    max_bytes: int | None = None
    """--kv-storage-size: of all servers together; None is no limit."""
    ttl_s: int | None = None
    """--kv-storage-ttl-s: how long a value is kept after its last use; None is no limit."""
    timeout_s: float = 5.0
    """--kv-storage-timeout-s: later answers come to nothing."""


class Backend(Protocol):
    """Values by key."""

    def get(self, keys: Sequence[bytes], num_bytes: int) -> list[Value | None]:
        """The value of each key; None where there is none. `num_bytes`: how long a whole value is.
        A longer value need not be read: any value of another length will do in its place."""
        ...

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Store values; for each, whether it is stored. A reader sees all of one or nothing."""
        ...

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether there is a value for each key. Counts as use."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove values; harmless where there is none."""
        ...

    def keep(self, keys: Sequence[bytes], for_s: float) -> None:
        """Evict these after all others for so many seconds from now, if the backend can tell them
        apart; 0 ends that. A request asked for it (T13). Harmless where there is no value."""
        ...

    def close(self) -> None:
        """No call follows."""
        ...


class BackendKind(Protocol):
    """What an entry point of the group `manyroots.kv_storage` names: most simply, the class of the
    backend with these two as class methods. The entry point's name is the scheme of its URLs."""

    def check(self, url: str, options: StorageOptions) -> None:
        """Raise `ConfigError`, with a remedy, where the URL or an option can't be served. Called
        before the model is loaded; connects to nothing."""
        ...

    def open(self, url: str, options: StorageOptions) -> Backend:
        """Called once per rank, after `check`. Storage that can't be reached now may be reached
        later: raise only what no retry can mend."""
        ...
