"""What a rank other than the first does: load its part, then carry out the plans it is sent.

Takes a channel to the first rank and a way to build; gives an exit code. Its answers say that
adapters are loaded and that copies between tiers have ended; results of steps come from the first
rank alone. It ends when it is told to, when a step fails (the ranks can't be brought back into
step), and when the first rank is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from manyroots.distributed.channel import Channel, ClosedError
from manyroots.distributed.wire import Join, Loaded, RankMessageKind, StartSteps, decode, encode
from manyroots.errors import ManyrootsError
from manyroots.step import AdapterLoaded, CopyDone, DropAdapter, Plan

logger = logging.getLogger(__name__)

Tell = Callable[[AdapterLoaded | CopyDone], None]


class Steps(Protocol):
    """A rank that computes."""

    def execute(self, plan: Plan) -> object:
        """One step, now."""
        ...

    def drop(self, intent: DropAdapter) -> None:
        """Undo a load that failed on another rank."""
        ...

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove this rank's parts of pages from storage."""
        ...

    def close(self) -> None: ...


class RankWorker(Protocol):
    """A rank's part of the model, loaded."""

    @property
    def num_pages(self) -> int:
        """Of all layers, as many as fit beside the weights."""
        ...

    @property
    def adapter_room(self) -> int:
        """The same for adapters, in slots or blocks."""
        ...

    def start(self, start: StartSteps, tell: Tell) -> Steps:
        """Make room for pages and meet the others. `tell` takes the ends of adapter loads and of
        copies."""
        ...


def main(build: Callable[[Join], RankWorker]) -> int:
    """The body of a rank's process."""
    channel = Channel(_standard_input())
    inbox: queue.SimpleQueue[tuple[RankMessageKind, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), daemon=True).start()
    try:
        steps = _load(channel, inbox, build)
        _follow(inbox, steps)
    except Exception as error:
        is_ours = isinstance(error, ManyrootsError)
        reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
        logger.error("ends: %s", reason, exc_info=None if is_ours else error)
        with contextlib.suppress(ClosedError):
            channel.send(*encode(RankMessageKind.FAILED, reason))
        return 1
    return 0


def _load(
    channel: Channel,
    inbox: queue.SimpleQueue[tuple[RankMessageKind, Any]],
    build: Callable[[Join], RankWorker],
) -> Steps:
    _, join = inbox.get()
    assert isinstance(join, Join)
    part = build(join)
    channel.send(*encode(RankMessageKind.LOADED, Loaded(part.num_pages, part.adapter_room)))
    _, start = inbox.get()
    if start is None:
        raise ManyrootsError("the first rank closed before the start")
    assert isinstance(start, StartSteps)

    def tell(answer: AdapterLoaded | CopyDone) -> None:
        is_copy = isinstance(answer, CopyDone)
        kind = RankMessageKind.COPY if is_copy else RankMessageKind.ADAPTER
        with contextlib.suppress(ClosedError):
            channel.send(*encode(kind, answer))

    return part.start(start, tell)


def _follow(inbox: queue.SimpleQueue[tuple[RankMessageKind, Any]], steps: Steps) -> None:
    while True:
        kind, body = inbox.get()
        if kind is RankMessageKind.PLAN:
            steps.execute(body)
        elif kind is RankMessageKind.DROP:
            steps.drop(body)
        elif kind is RankMessageKind.FORGET:
            steps.forget(body)
        else:
            assert kind is RankMessageKind.CLOSE
            steps.close()
            return


def _receive(channel: Channel, inbox: queue.SimpleQueue[tuple[RankMessageKind, Any]]) -> None:
    folder = ""
    while True:
        try:
            kind, body = decode(channel.receive())
        except ClosedError:
            # The first rank is gone, and with it all that waited for this one. It was killed:
            # it would have cleared up.
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
        if kind is RankMessageKind.JOIN:
            folder = body.folder
        inbox.put((kind, body))


def _standard_input() -> socket.socket:
    """The channel's socket, under a number that no child of this process inherits."""
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return channel
