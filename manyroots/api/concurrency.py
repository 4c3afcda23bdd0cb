"""The bounded queue: how many sequences may be alive at once.

A request is admitted with all its sequences or not at all. Counting happens here, before
anything is tokenized, so that overload costs the server next to nothing.
"""

from __future__ import annotations

from types import TracebackType

from manyroots.api.tenants import TenantLease
from manyroots.errors import OverloadedError

RETRY_AFTER_S = 1


class ConcurrencyLimit:
    """Counts the sequences that are alive."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_alive = 0

    def admit(self, num_sequences: int) -> Permits:
        """Permits for one request; raises OverloadedError if they are not all free."""
        if self.num_alive + num_sequences > self.limit:
            raise OverloadedError(
                f"The server is busy: {self.num_alive} sequences are running or waiting, this "
                f"request has {num_sequences}, and {self.limit} are allowed. Try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_alive += num_sequences
        return Permits(self, num_sequences)


class Permits:
    """One request's share. Released exactly once, however often `release` is called."""

    def __init__(self, limit: ConcurrencyLimit, count: int) -> None:
        self._limit = limit
        self._count = count
        self.lease: TenantLease | None = None
        """Of its key's limits."""

    def release(self) -> None:
        self._limit.num_alive -= self._count
        self._count = 0
        if self.lease is not None:
            self.lease.release()

    def __enter__(self) -> Permits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
