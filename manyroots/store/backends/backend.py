"""What a storage backend is: values by key, in batches. One file per kind, one line in `choice.py`.

Takes keys of 32 bytes and values of any; gives them back as they were, or not at all. Whether a
value is whole is checked by the caller. What can't be reached raises, in a limited time where the
backend can see to that. Several threads may ask at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Value = bytes | memoryview


class Backend(Protocol):
    """Values by key."""

    def get(self, keys: Sequence[bytes], num_bytes: int) -> list[Value | None]:
        """What is kept for each key; None where nothing is. `num_bytes`: how long a whole value
        is; what is longer need not be read to its end."""
        ...

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Keep values; for each, whether it is kept. A reader sees all of one or nothing."""
        ...

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether something is kept for each key. Counts as use."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Keep these no longer."""
        ...

    def close(self) -> None: ...
