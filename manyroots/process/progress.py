"""How far a start has come: reported where it loads, shown where there is a terminal or a log.

`track` passes items on and tells each one; `stage` times a part of the start. Where the news go is
set by `told_to` around the whole of it: a display on this process' stderr, or the wire to the
process that has one. By default nothing listens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

_MIN_PAUSE_S = 0.1
"""Between two news of one stage: a checkpoint has thousands of tensors."""
_LINE_PAUSE_S = 5.0
"""Between two lines of one stage in a log."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one stage."""

    stage: str
    done: int
    total: int


@dataclass(slots=True)
class _Listener:
    tell: Callable[[Progress], None]
    seconds: dict[str, float] = field(default_factory=dict)


_listener: _Listener | None = None
"""One for all threads: parts of a start run on others than the one that waits for it."""


@contextmanager
def told_to(tell: Callable[[Progress], None]) -> Iterator[dict[str, float]]:
    """Have `tell` called with the news of everything in the block; gives the stages' seconds."""
    global _listener
    before, _listener = _listener, _Listener(tell)
    try:
        yield _listener.seconds
    finally:
        _listener = before


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Time a part of the start."""
    begin = time.monotonic()
    try:
        yield
    finally:
        if _listener is not None:
            spent = time.monotonic() - begin
            _listener.seconds[name] = _listener.seconds.get(name, 0.0) + spent


def track(items: Iterable[T], *, total: int, label: str) -> Iterator[T]:
    """Pass `items` on, and tell how many have been taken; nothing of a stage that has none."""
    listener = _listener
    if listener is None or total == 0:
        yield from items
        return
    listener.tell(Progress(label, 0, total))
    last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last >= _MIN_PAUSE_S:
            last = time.monotonic()
            listener.tell(Progress(label, min(done, total - 1), total))
    listener.tell(Progress(label, total, total))


def in_words(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())


def is_watched(stream: TextIO | None = None) -> bool:
    """Whether stderr is a terminal."""
    return (stream or sys.stderr).isatty()


class Display:
    """Progress on stderr: a bar where a person watches, else a line at both ends and now and then.

    `is_on`: False shows nothing.
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._bar: Any = None
        self._begun: dict[str, float] = {}
        self._last_line = 0.0

    def __call__(self, progress: Progress) -> None:
        if not self._is_on:
            return
        if is_watched():
            self._draw(progress)
        else:
            self._print(progress)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, progress: Progress) -> None:
        # Imported here: benches run where rich is not installed.
        from rich.console import Console
        from rich.progress import Progress as Bar

        if self._bar is None:
            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(progress.stage, total=progress.total)
        [task] = self._bar.task_ids
        self._bar.update(
            task, description=progress.stage, completed=progress.done, total=progress.total
        )
        if progress.done == progress.total:
            self._bar.refresh()
            self.close()

    def _print(self, progress: Progress) -> None:
        now = time.monotonic()
        if not progress.done:
            self._begun[progress.stage] = now  # again, where an engine is started again
        begun = self._begun.setdefault(progress.stage, now)
        is_end = progress.done == progress.total
        if progress.done and not is_end and now - self._last_line < _LINE_PAUSE_S:
            return
        self._last_line = now
        took = f", {now - begun:.1f} s" if is_end else ""
        line = f"{progress.stage}: {progress.done} of {progress.total}{took}"
        print(line, file=sys.stderr, flush=True)
