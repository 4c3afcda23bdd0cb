"""The seam that the API and `LLM` see: submit sequences, receive outputs.

`ProcessClient` (engine/process_client.py) speaks to an engine in another process; tests use a
fake through the same protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from manyroots.ids import RequestId
from manyroots.messages import EngineInfo, Output, Stats, Submit


class EngineClient(Protocol):
    """An engine as the API sees it. All methods belong to one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model; raises UnavailableError before `start` returned."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once the engine has died; then `generate` raises UnavailableError."""
        ...

    @property
    def stats(self) -> Stats | None:
        """The newest counts, None before the first step."""
        ...

    def next_request_id(self) -> RequestId:
        """A number no other sequence of this engine has."""
        ...

    def generate(self, request: Submit) -> AsyncIterator[Output]:
        """Outputs of one sequence until the one with a finish_reason.

        Leaving the iterator early (aclose) aborts the sequence. If the engine dies, raises
        UnavailableError.
        """
        ...

    async def start(self) -> None:
        """Return when the engine can serve; raise what kept it from starting."""
        ...

    async def close(self) -> None:
        """End the engine and everything it runs."""
        ...
