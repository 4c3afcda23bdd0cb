"""Moves bytes beside the steps: adapters to the device, units between tiers.

Takes what plans ask for, in their order; gives the ends, in any order. Nothing here waits but
`wait`, which is what a plan that `waits` asks for: until anything has ended.

Copies within the device are part of a step and not carried out here (`device_copies.py`). There are
no bytes on lower tiers yet: a copy to or from one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from manyroots.step import AdapterIntent, AdapterLoaded, Copy, CopyDone
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.device_copies import is_within_device


@dataclass(frozen=True, slots=True)
class Ends:
    """What has ended since somebody last asked."""

    adapters: tuple[AdapterLoaded, ...] = ()
    copies: tuple[CopyDone, ...] = ()


class Mover:
    """All that is on its way."""

    def __init__(self, adapters: AdapterLoader | None) -> None:
        """`adapters`: None for the base model alone."""
        self._adapters = adapters

    def start(self, intents: Iterable[AdapterIntent], copies: Iterable[Copy]) -> None:
        """Begin what a plan asks for; returns at once."""
        for copy in copies:
            if not is_within_device(copy):
                raise RuntimeError(
                    f"copy {copy.copy_id} is from {copy.source.value} to {copy.target.value}, and "
                    "this engine has no bytes below the device"
                )
        intents = tuple(intents)
        if not intents:
            return
        if self._adapters is None:
            raise RuntimeError("a plan names adapters, and this runner was made without them")
        self._adapters.start(intents)

    def finished(self) -> Ends:
        """The ends that nobody has taken yet."""
        if self._adapters is None:
            return Ends()
        return Ends(adapters=self._adapters.finished())

    def wait(self, timeout_s: float) -> None:
        """Until something has ended, or nothing is under way, or the time is over."""
        if self._adapters is not None:
            self._adapters.wait(timeout_s)

    def close(self) -> None:
        """Wait for what is under way; what has not begun never does."""
        if self._adapters is not None:
            self._adapters.close()
