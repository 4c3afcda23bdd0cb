"""One look at the engine for all pages that are open.

Takes pages as they come and go; gives each its stream of events: the whole state first, then what
changes. While no page is open nothing is asked. However many are open, the engine is asked once,
and the more an answer cost it, the later it is asked again: looking takes a bounded share of its
processor time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from manyroots.api.concurrency import ConcurrencyLimit
from manyroots.api.events import named_event
from manyroots.api.page.state import PageState
from manyroots.api.page.what_if import WhatIf
from manyroots.api.state import ServerState
from manyroots.errors import UnavailableError
from manyroots.snapshot import Snapshot

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
TREE_INTERVAL_S = 1.5
COST_FACTOR = 200
"""A look that took the engine so long is repeated no sooner than after so many times that: half a
percent of its processor time, and as much for the tree."""
LOOK_LIMIT_S = 30.0
"""An engine that computes one long step answers after it."""
MAX_PAGES_OPEN = 64


class PageHub:
    """The pages that are open, and the task that looks for them."""

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self.state = PageState(server)
        self.what_if = WhatIf()
        self.limit = ConcurrencyLimit(MAX_PAGES_OPEN)
        self._num_pages = self._num_trees = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._seq = self._tree_seq = 0
        self._change = self._tree_change = b""
        self._whole = self._whole_tree = b""
        """Encoded when a page first needs them; empty when a look has made them old."""
        self._tree_due_s = 0.0
        self._is_closed = False

    def close(self) -> None:
        """End all streams: the server ends."""
        self._is_closed = True
        self._wake()

    async def stream(self, *, wants_tree: bool) -> AsyncGenerator[bytes, None]:
        """Events of one page, until it goes away."""
        self._num_pages += 1
        self._num_trees += wants_tree
        if self._task is None or self._task.done():
            # The last look may be hours old: this page waits for the first new one.
            self._seq = self._tree_seq = 0
            self._tree_due_s = 0.0
            self._task = asyncio.create_task(self._look_again_and_again())
        seen = tree_seen = 0
        try:
            yield b"retry: 1000\n\n"
            while not self._is_closed:
                changed = self._changed
                if self._seq != seen:
                    yield self._change if seen and seen == self._seq - 1 else self._whole_state()
                    seen = self._seq
                if wants_tree and self.state.tree is not None and self._tree_seq != tree_seen:
                    is_next = tree_seen and tree_seen == self._tree_seq - 1
                    yield self._tree_change if is_next else self._whole_tree_state()
                    tree_seen = self._tree_seq
                await changed.wait()
        finally:
            self._num_pages -= 1
            self._num_trees -= wants_tree
            if self._num_pages == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _look_again_and_again(self) -> None:
        while True:
            pause_s = INTERVAL_S
            try:
                pause_s = await self._look()
            except Exception:
                logger.exception("the page's state could not be made")
            await asyncio.sleep(pause_s)

    async def _look(self) -> float:
        """Ask once, and tell all pages; gives how long to wait before the next time."""
        server, state = self._server, self.state
        wants_tree = self._num_trees > 0 and time.monotonic() >= self._tree_due_s
        snapshot: Snapshot | None = None
        if server.loaded is not None and server.engine.is_alive:
            same_life = state.life == server.engine.num_restarts
            with suppress(UnavailableError, TimeoutError):
                snapshot = await asyncio.wait_for(
                    server.engine.look(
                        since_step=state.since_step if same_life else 0, wants_tree=wants_tree
                    ),
                    LOOK_LIMIT_S,
                )
        change = state.take(snapshot)
        self._whole = b""
        self._seq += 1
        is_anew = change.pop("anew", False)
        self._change = self._whole_state() if is_anew else named_event("change", change)
        if is_anew:
            self._tree_due_s = 0.0
            self._tree_seq += 1  # the next tree is not a change of the dead engine's
        cost_s = 0.0
        if snapshot is not None:
            cost_s = snapshot.cpu_s
            if snapshot.tree is not None:
                self._tree_change = named_event("tree_change", state.take_tree(snapshot.tree))
                self._whole_tree = b""
                self._tree_seq += 1
                self._tree_due_s = time.monotonic() + max(TREE_INTERVAL_S, COST_FACTOR * cost_s)
                cost_s = 0.0  # most of it was the tree's
        self._wake()
        return max(INTERVAL_S, COST_FACTOR * cost_s)

    def _whole_state(self) -> bytes:
        """Encoded once for all pages that need it."""
        self._whole = self._whole or named_event("state", self.state.whole())
        return self._whole

    def _whole_tree_state(self) -> bytes:
        tree: Any = self.state.whole_tree()
        self._whole_tree = self._whole_tree or named_event("tree", tree)
        return self._whole_tree

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
