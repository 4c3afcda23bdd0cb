"""Records which pages became findable on which tier, and which are gone: data for routers (K01,
K02).

Stored minus removed is exactly what is resident: events are recorded only where the index changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.ids import Namespace, Tier


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages of one prefix that can now be found on a tier."""

    tier: Tier
    namespace: Namespace
    begin: int
    """The first token of the first page that the namespace's weights computed, if they did not
    compute the whole page. That page is then the only one (N23)."""
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
