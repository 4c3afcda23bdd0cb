"""What a storage backend is: values by key, in batches. Plug-ins implement these protocols (T14).

Takes keys of 32 bytes and values of any length; returns values unchanged, or not at all. The caller
checks whether a value is complete. A failed operation raises, within `StorageOptions.timeout_s` if
the backend can ensure that; the caller's own limit ends a copy in any case. Several threads call at
once.

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
    """Storage flags that apply to every kind of backend."""

    max_bytes: int | None = None
    """--kv-storage-size: of all servers together; None: no limit."""
    ttl_s: int | None = None
    """--kv-storage-ttl-s: how long a value is kept after its last use; None: no limit."""
    timeout_s: float = 5.0
    """--kv-storage-timeout-s: later answers are ignored."""


class Backend(Protocol):
    """Values by key."""

    def get(self, keys: Sequence[bytes], num_bytes: int) -> list[Value | None]:
        """The value of each key; None if there is none. `num_bytes`: the length of a complete
        value. A longer value need not be read: any value of another length may be returned
        instead."""
        ...

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Store values; for each, whether it is stored. A reader sees all of one or nothing."""
        ...

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether there is a value for each key. Counts as use."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove values; does nothing for keys without a value."""
        ...

    def keep(self, keys: Sequence[bytes], for_s: float) -> None:
        """Evict these after all others for so many seconds from now, if the backend can tell them
        apart; 0 ends that. A request asked for it (T13). Does nothing for keys without a value."""
        ...

    def close(self) -> None:
        """Release all resources; no call follows."""
        ...


class BackendKind(Protocol):
    """What an entry point of the group `manyroots.kv_storage` names: most simply, the class of the
    backend with these two as class methods. The entry point's name is the scheme of its URLs."""

    def check(self, url: str, options: StorageOptions) -> None:
        """Raise `ConfigError`, with a remedy, if the URL or an option is not supported. Called
        before the model is loaded; connects to nothing."""
        ...

    def open(self, url: str, options: StorageOptions) -> Backend:
        """Called once per rank, after `check`. Unreachable storage may be reachable later: raise
        only errors that no retry can mend."""
        ...
