"""Arenas, backends and copies for tests of the tiers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from manyroots.ids import CopyId, Tier
from manyroots.step import Copy, CopyDone
from manyroots.store.backends.backend import Value
from manyroots.store.tier_copies import TierCopies
from tests.helpers.debian import command_of
from tests.helpers.patience import PATIENCE_S


class Arena:
    """Units of random bits."""

    def __init__(self, num_units: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        num_bytes = num_units * 2 * 3 * 5 * dtype.itemsize
        bits = torch.from_numpy(rng.integers(0, 256, num_bytes, np.uint8))
        self.data = bits.view(dtype).view(num_units, 2, 3, 5)

    def bits(self, unit: int) -> bytes:
        return self.data[unit].reshape(-1).view(torch.uint8).numpy().tobytes()


class Shelf:
    """A backend in memory, which can be made to fail, hang and forget."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.kept: dict[bytes, float] = {}
        """What `keep` was told last, by key."""
        self.fault: Exception | None = None
        self.is_open, self.was_asked, self.has_answered = (threading.Event() for _ in range(3))
        self.is_open.set()
        """Cleared: no call is answered before it is set."""

    def get(self, keys: Sequence[bytes], num_bytes: int) -> list[Value | None]:
        self._pass()
        return [self.values.get(key) for key in keys]

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        self._pass()
        self.values.update(items)
        return [True] * len(items)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._pass()
        return [key in self.values for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        self._pass()
        for key in keys:
            self.values.pop(key, None)

    def keep(self, keys: Sequence[bytes], for_s: float) -> None:
        self._pass()
        self.kept |= dict.fromkeys(keys, for_s)

    def close(self) -> None:
        pass

    def _pass(self) -> None:
        self.was_asked.set()
        self.is_open.wait(PATIENCE_S)
        self.has_answered.set()
        if self.fault is not None:
            raise self.fault


def copy(
    number: int,
    source: Tier,
    target: Tier,
    sources: Sequence[int],
    targets: Sequence[int],
    hashes: tuple[bytes, ...] = (),
    family: int = 0,
) -> Copy:
    units = (np.array(sources, np.int32), np.array(targets, np.int32))
    return Copy(CopyId(number), family, source, target, *units, hashes)


def end_of(copies: TierCopies, *started: Copy) -> dict[int, CopyDone]:
    """Start copies and wait for all of them."""
    for one in started:
        copies.start(one)
    ended: dict[int, CopyDone] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(ended) < len(started):
        assert time.monotonic() < deadline
        copies.wait(0.05)
        ended |= {done.copy_id: done for done in copies.finished()}
    return ended


class RedisServer:
    """Debian's redis-server on a free port, with nothing on disk; ended by its own pid."""

    def __init__(
        self, folder: Path, *arguments: str, port: int | None = None, is_tls: bool = False
    ) -> None:
        self._scheme = "rediss" if is_tls else "redis"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.port = free_port() if port is None else port
            ports = ["--port", str(self.port)]
            if is_tls:
                ports = ["--port", "0", "--tls-port", str(self.port)]
            self.process = subprocess.Popen(
                [server_program(), *ports, "--bind", "127.0.0.1", "--save", "",
                 "--appendonly", "no", "--dir", str(folder), *arguments],
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
            while self.process.poll() is None:  # otherwise another process took the port first
                assert time.monotonic() < deadline, "redis-server did not start"
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                    return
                time.sleep(0.02)
            assert time.monotonic() < deadline, "redis-server did not start"

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """A port that another process may take before it is used."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def server_program() -> str:
    """Where it is; empty if this machine has neither Redis nor Valkey, and can't install it."""
    return command_of("redis-server", "redis-server", "valkey-server") or ""
