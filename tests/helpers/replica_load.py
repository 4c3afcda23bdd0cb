"""Streams that run all the time while engines and gateways die, restart or come and go.

Each answer is compared with what the model gives alone. A caller asks again when its connection
breaks before any output, as OpenAI's clients do.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from tests.helpers.patience import PATIENCE_S


@dataclass(frozen=True)
class Asked:
    """A request, and the tokens that it must give."""

    body: dict[str, Any]
    expected: list[int]


class StreamLoad:
    """This many callers, each with one stream at a time, until the block ends."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        asked: Sequence[Asked],
        *,
        num_callers: int = 8,
        errors: Sequence[str] = (),
        may_break: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        """`errors`: what a stream that had begun may end with; other errors are wrong.
        `may_break`: a connection may, because gateways are killed. `pause_s`: of each caller after
        each stream, so that engines which start have the processor for themselves now and then."""
        self._url = url
        self._headers = headers
        self._asked = asked
        self._errors = errors
        self._may_break = may_break
        self._num_callers = num_callers
        self._pause_s = pause_s
        self._pool = ThreadPoolExecutor(num_callers)
        self._stop = threading.Event()
        self._work: list[Future[None]] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def __enter__(self) -> StreamLoad:
        self._work = [self._pool.submit(self._call, i) for i in range(self._num_callers)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        for each in self._work:
            each.result(PATIENCE_S)
        self._pool.shutdown()

    def wait_for_more(self, number: int) -> None:
        """Wait until this many more requests have been answered completely."""
        goal, deadline = self.counts["whole"] + number, time.monotonic() + PATIENCE_S
        while self.counts["whole"] < goal:
            assert time.monotonic() < deadline, (self.counts, self.wrong[:3])
            time.sleep(0.02)

    def _call(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S, headers=self._headers) as client:
            while not self._stop.is_set():
                self._ask(client, self._asked[number % len(self._asked)])
                number += self._num_callers
                self._stop.wait(self._pause_s)

    def _ask(self, client: httpx.Client, asked: Asked) -> None:
        got: list[int] = []
        error, status = None, 200
        try:
            body = asked.body | {"stream": True}
            with client.stream("POST", "/v1/completions", json=body) as reply:
                status = reply.status_code
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            error = event["error"]["message"]
                        else:
                            got += event["choices"][0].get("token_ids") or []
        except httpx.TransportError as broken:
            self.counts["cut" if got else "asked again"] += 1
            if not self._may_break:
                self.wrong.append(f"{len(got)} tokens, then {broken!r}")
            return
        if status != 200:
            self.wrong.append(f"status {status}")
        elif error is not None:
            self.counts["cut"] += 1
            if not got or not any(text in error for text in self._errors):
                self.wrong.append(f"{len(got)} tokens, then {error}")
        elif got != asked.expected:
            self.wrong.append(f"{got} instead of {asked.expected}")
        else:
            self.counts["whole"] += 1
