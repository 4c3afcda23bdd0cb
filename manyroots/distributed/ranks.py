"""The other ranks of an engine, as its first one sees them: processes that follow plans.

Starts one process for each, tells each its rank, and passes messages both ways. A rank that ends
unasked is reported at once, through its channel's end. Knows no tensors, and nothing
of what the messages are for.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyroots.config import EngineSettings
from manyroots.distributed.channel import Channel, ClosedError
from manyroots.distributed.wire import Join, Loaded, RankMessageKind, decode, encode
from manyroots.errors import ModelError
from manyroots.process.torch_allocator import engine_environment

RANK_COMMAND = (sys.executable, "-m", "manyroots.engine.rank_process")
CLOSE_TIMEOUT_S = 5.0


class Ranks:
    """Owns the processes of ranks 1 and up, and the folder in which all ranks meet. They look for
    each other there as long as the group is there; if this process is killed, they remove it."""

    def __init__(
        self, size: int, settings: EngineSettings, *, command: Sequence[str] = RANK_COMMAND
    ) -> None:
        # A folder of our own, so that no other user of the machine can join.
        self._folder = tempfile.TemporaryDirectory(prefix="manyroots-ranks-")
        self.folder = Path(self._folder.name)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._is_closing = False
        for rank in range(1, size):
            here, there = socket.socketpair()
            with there:
                # Its standard input is the channel: its end means that the parent is gone. A
                # session of its own, so that Ctrl-C in a terminal reaches only the parent.
                process = subprocess.Popen(
                    command, stdin=there.fileno(), start_new_session=True, env=engine_environment()
                )
            self._processes.append(process)
            self._channels.append(Channel(here))
            join = Join(rank, size, str(self.folder), settings)
            with contextlib.suppress(ClosedError):  # told by `wait_until_loaded`
                self._channels[-1].send(*encode(RankMessageKind.JOIN, join))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_until_loaded(self) -> Loaded:
        """What fits on the rank with the least room; raises what kept one from loading."""
        fits: list[Loaded] = []
        for rank, channel in enumerate(self._channels, start=1):
            try:
                kind, body = decode(channel.receive())
            except ClosedError:
                raise ModelError(f"{self._ended(rank)} while loading; see its log above") from None
            if kind is RankMessageKind.FAILED:
                raise ModelError(f"rank {rank}: {body}")
            assert isinstance(body, Loaded)
            fits.append(body)
        return Loaded(min(fit.num_pages for fit in fits), min(fit.adapter_room for fit in fits))

    def watch(
        self,
        on_message: Callable[[int, RankMessageKind, Any], None],
        on_death: Callable[[str], None],
    ) -> None:
        """Call these from now on, from threads of our own: what a rank says, and that one ended."""
        for rank, channel in enumerate(self._channels, start=1):
            threading.Thread(
                target=self._receive,
                args=(rank, channel, on_message, on_death),
                name=f"rank-{rank}",
                daemon=True,
            ).start()

    def send(self, kind: RankMessageKind, body: object) -> None:
        """The same message to every rank. One that is gone is told by `watch`, not here."""
        message = encode(kind, body)
        for channel in self._channels:
            with contextlib.suppress(ClosedError):
                channel.send(*message)

    def kill(self) -> None:
        """End them all now: what they compute is of no use any more."""
        self._is_closing = True
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Let them finish what was sent, then see them end."""
        self._is_closing = True
        self.send(RankMessageKind.CLOSE, None)
        for process in self._processes:
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self._channels:
            channel.close()
        self._folder.cleanup()

    def _receive(
        self,
        rank: int,
        channel: Channel,
        on_message: Callable[[int, RankMessageKind, Any], None],
        on_death: Callable[[str], None],
    ) -> None:
        last_words = ""
        while True:
            try:
                kind, body = decode(channel.receive())
            except ClosedError:
                break
            if kind is RankMessageKind.FAILED:
                last_words = f": {body}"
            else:
                on_message(rank, kind, body)
        if not self._is_closing:
            on_death(self._ended(rank) + last_words)

    def _ended(self, rank: int) -> str:
        code = self._processes[rank - 1].wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {rank} (process {self._processes[rank - 1].pid}) {how}"
