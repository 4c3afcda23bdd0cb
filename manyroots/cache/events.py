"""What became findable on which tier, and what ceased to be: data for routers (K01, K02).

Stored minus removed is what is resident, exactly: an event is recorded where the index changes
and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.ids import Namespace, Tier


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages that can now be found on a tier, consecutive ones of one prefix."""

    tier: Tier
    namespace: Namespace
    begin: int
    """The first token of the first page that the namespace's weights computed, where that is not
    all of it: then it is the only page (N23)."""
    parent: bytes | None
    """Hash of the page before the first; None at the beginning of a sequence."""
    hashes: tuple[bytes, ...]
    tokens: bytes
    """int32 token ids of all pages."""


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that can no longer be found on a tier."""

    tier: Tier
    namespace: Namespace
    begin: int
    """As in `PagesStored`."""
    hashes: tuple[bytes, ...]


CacheEvent = PagesStored | PagesRemoved
