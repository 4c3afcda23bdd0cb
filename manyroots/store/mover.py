"""Moves bytes beside the steps: adapters to the device, units between tiers.

Takes the intents of plans, in order; gives their ends, in any order. Only `wait` blocks: a plan
that `waits` blocks until anything has ended.

Copies within the device are part of a step and are not executed here (`device_copies.py`). Without
lower tiers, a copy to or from one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from manyroots.step import AdapterIntent, AdapterLoaded, Copy, CopyDone, KeepStored
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.device_copies import is_within_device
from manyroots.store.layer_arrivals import LayerArrivals
from manyroots.store.tier_copies import TierCopies


@dataclass(frozen=True, slots=True)
class Ends:
    """Everything that has ended since the last call."""

    adapters: tuple[AdapterLoaded, ...] = ()
    copies: tuple[CopyDone, ...] = ()


class Mover:
    """Everything in progress."""

    def __init__(self, adapters: AdapterLoader | None, tiers: TierCopies | None = None) -> None:
        """`adapters`: None for only the base model. `tiers`: None for only the device."""
        self._adapters = adapters
        self._tiers = tiers

    def start(
        self, intents: Iterable[AdapterIntent], copies: Iterable[Copy]
    ) -> LayerArrivals | None:
        """Start a plan's intents; returns at once. Returns what the plan's own rows wait for while
        they compute, or None."""
        arrivals = self._start_copies([copy for copy in copies if not is_within_device(copy)])
        intents = tuple(intents)
        if intents:
            if self._adapters is None:
                raise RuntimeError("a plan names adapters, and this runner was made without them")
            self._adapters.start(intents)
        return arrivals

    def _start_copies(self, copies: list[Copy]) -> LayerArrivals | None:
        if not copies:
            return None
        if self._tiers is None:
            raise RuntimeError(
                f"copy {copies[0].copy_id} is from {copies[0].source.value} to "
                f"{copies[0].target.value}, and this engine has no bytes below the device"
            )
        overlapped = [copy for copy in copies if copy.is_overlapped]
        arrivals = self._tiers.start_overlapped(overlapped) if overlapped else None
        for copy in copies:
            if not copy.is_overlapped:
                self._tiers.start(copy)
        return arrivals

    def finished(self) -> Ends:
        """Ends that were not taken yet."""
        adapters = () if self._adapters is None else self._adapters.finished()
        copies = () if self._tiers is None else self._tiers.finished()
        return Ends(adapters, copies)

    def wait(self, timeout_s: float) -> None:
        """Wait until something has ended, nothing is in progress, or the timeout. With both
        adapters and tiers, each has half of the time."""
        parts = [part for part in (self._adapters, self._tiers) if part is not None]
        for part in parts:
            part.wait(timeout_s / len(parts))

    def keep_stored(self, keeps: Iterable[KeepStored]) -> None:
        """Have storage keep pages longer; returns at once."""
        if self._tiers is not None:
            for keep in keeps:
                self._tiers.keep_stored(keep)

    def forget_stored(self, hashes: Sequence[bytes]) -> None:
        """Remove pages from storage."""
        if self._tiers is not None:
            self._tiers.forget_stored(hashes)

    def close(self) -> None:
        """Wait for running work; work that has not started never does."""
        if self._adapters is not None:
            self._adapters.close()
        if self._tiers is not None:
            self._tiers.close()
