"""Progress bars on stderr, only where a person watches.

Takes an iterable and how many items it has; gives the same items.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def is_watched() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()


def track(items: Iterable[T], *, total: int, label: str) -> Iterator[T]:
    """Pass `items` on, with a bar if stderr is a terminal."""
    if not is_watched():
        yield from items
        return
    # Imported here: benches run where there is nobody to watch, and no rich.
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    yield from rich_track(items, label, total=total, console=console, transient=True)
