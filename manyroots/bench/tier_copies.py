"""How fast units go between a GPU and the host, and what steps beside that lose.

Takes shapes of units; copies batches of them, from and to random places, by the same code that
serves (`store/host_link.py`). Rates are by the device's own clock; the share is of what the bus of
an H200 gives. Without a GPU there is no bus to measure.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from manyroots.bench.spread import spread
from manyroots.errors import ConfigError
from manyroots.ids import CopyId, Tier
from manyroots.step import Copy, CopyDone
from manyroots.store.host_arena import HostArena
from manyroots.store.host_link import HostLink

BUS_BYTES_PER_S = 55e9
"""What a copy of much memory in one piece reaches on an H200's bus."""
BATCH_BYTES = 1 << 30
UNIT_SHAPES: dict[str, tuple[int, ...]] = {
    "pages of Qwen3-8B": (36, 2, 16, 8, 128),
    "pages of gpt-oss-20b's windows": (12, 2, 16, 8, 64),
}
"""Layers, keys and values, tokens, heads, dimensions; in bfloat16."""
_WAYS = {"to host": Tier.HOST, "from host": Tier.DEVICE}


@dataclass(slots=True)
class _DeviceUnits:
    """One family's units at both ends."""

    data: torch.Tensor


class UnitBatches:
    """Batches of units at random places, back and forth, until the caller stops."""

    def __init__(self, shape: tuple[int, ...], num_units: int, seed: int = 0) -> None:
        device = torch.randint(
            0, 255, (2 * num_units, int(np.prod(shape)) * 2), dtype=torch.uint8, device="cuda"
        )
        self.num_units = num_units
        self.batch_bytes = num_units * device.shape[1]
        self._device = _DeviceUnits(device)
        # Half for each way, so that both may go on at once.
        self._host = HostArena(2 * num_units, device)
        self._rng = np.random.default_rng(seed)
        self._ended = threading.Condition()
        self._done: dict[int, CopyDone] = {}
        self._number = 0
        self._link = HostLink([self._device], [self._host], self._report)
        if not self._host.data.is_pinned():
            raise ConfigError("host memory can't be page-locked here; nothing was measured.")

    def start(self, way: str) -> int:
        """Begin a batch; gives its number."""
        self._number += 1
        first = 0 if way == "to host" else self.num_units
        here, there = (
            (first + self._rng.permutation(self.num_units)).astype(np.int32) for _ in range(2)
        )
        target = _WAYS[way]
        source = Tier.DEVICE if target is Tier.HOST else Tier.HOST
        self._link.start(Copy(CopyId(self._number), 0, source, target, here, there, ()))
        return self._number

    def end(self, number: int) -> float:
        """Wait for a batch; gives its seconds."""
        with self._ended:
            self._ended.wait_for(lambda: number in self._done)
            done = self._done.pop(number)
        if done.error is not None:
            raise ConfigError(f"a copy failed: {done.error}")
        return done.seconds

    def close(self) -> None:
        self._link.close()

    def _report(self, done: CopyDone) -> None:
        with self._ended:
            self._done[done.copy_id] = done
            self._ended.notify_all()


class BusyLink:
    """Copies both ways without a pause, from `with` to its end."""

    def __init__(self, link: UnitBatches) -> None:
        self._link = link
        self._is_over = threading.Event()
        self.seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
        self._threads = [threading.Thread(target=self._run, args=(way,)) for way in _WAYS]

    def __enter__(self) -> BusyLink:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, way: str) -> None:
        # One more always waits while one is under way.
        waiting = [self._link.start(way)]
        while not self._is_over.is_set():
            waiting.append(self._link.start(way))
            self.seconds[way].append(self._link.end(waiting.pop(0)))
        for number in waiting:
            self._link.end(number)

    def rates(self) -> dict[str, float]:
        """In GB/s."""
        return {
            way: round(self._link.batch_bytes / float(np.median(seconds)) / 1e9, 1)
            for way, seconds in self.seconds.items() if seconds
        }  # fmt: skip


def run_copies(repeats: int) -> dict[str, Any]:
    """Rates of each shape and way, alone; prints as it goes."""
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU here, so there are no copies to measure.")
    figures: dict[str, Any] = {}
    for name, shape in UNIT_SHAPES.items():
        unit_bytes = int(np.prod(shape)) * 2
        link = UnitBatches(shape, BATCH_BYTES // unit_bytes)
        figures[name] = {"unit_bytes": unit_bytes, "units": link.num_units}
        for way in _WAYS:
            link.end(link.start(way))
            seconds = [link.end(link.start(way)) for _ in range(repeats)]
            rate = link.batch_bytes / spread(seconds, 6)["median"]
            share = rate / BUS_BYTES_PER_S
            figures[name][way] = {
                "seconds": spread(seconds, 6), "gb_per_s": round(rate / 1e9, 2),
                "share_of_bus": round(share, 3),
            }  # fmt: skip
            print(
                f"{link.num_units} {name} of {unit_bytes / 1024:.0f} KiB {way:9}: "
                f"{rate / 1e9:5.1f} GB/s, {share:.2f} of {BUS_BYTES_PER_S / 1e9:.0f}"
            )
        link.close()
    return figures
