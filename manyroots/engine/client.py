"""The interface of an engine for the API and `LLM`: submit sequences, receive outputs.

`ProcessClient` (engine/process_client.py) talks to an engine in another process; tests use a fake
with the same protocol.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from typing import Protocol

from manyroots.engine.adapter_table import AdapterTable
from manyroots.errors import ManyrootsError, NotFoundError, RequestError, UnavailableError
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import (
    ControlReply,
    EngineInfo,
    ErrorKind,
    LoadLora,
    LoadTime,
    LoraReply,
    Output,
    Stats,
    Submit,
)
from manyroots.process.progress import Progress
from manyroots.snapshot import Snapshot

NO_COUNTS = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""The counts of an engine before its first step, and while its process is dead."""


class EngineDiedError(UnavailableError):
    """The engine that ran a request is dead."""

    def __init__(self, reason: str, *, has_begun: bool) -> None:
        """`has_begun`: it had started to compute the request, which may have caused its death."""
        super().__init__(reason)
        self.has_begun = has_begun


class PauseMode(enum.Enum):
    """How a pause treats running sequences."""

    KEEP = "keep"
    """They stop now and continue later."""
    WAIT = "wait"
    """They finish first."""
    ABORT = "abort"
    """They end with an error."""


class EngineWatch(Protocol):
    """Receives events of the engine for the live page."""

    def loaded(self, load: LoadTime) -> None:
        """An adapter was read or loaded to a faster tier."""

    def begun(self, request_id: RequestId) -> None:
        """A sequence starts to compute, perhaps again."""

    def stepped(self, stats: Stats) -> None:
        """The counts after a step."""


class EngineClient(Protocol):
    """An engine, seen from the API. All methods belong to one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model; raises UnavailableError before `start` returned."""
        ...

    @property
    def is_alive(self) -> bool:
        """False while the engine is dead or being started; `generate` raises UnavailableError."""
        ...

    @property
    def is_over(self) -> bool:
        """It is dead and will not be started again."""
        ...

    @property
    def progress(self) -> Progress | None:
        """Progress of a start; None if none is running or it has not reported yet."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often a dead engine was started again."""
        ...

    @property
    def stats(self) -> Stats | None:
        """The newest counts, None before the first step. For a dead engine only the waiting
        requests."""
        ...

    def next_request_id(self) -> RequestId:
        """A number that no other sequence of this engine has."""
        ...

    def generate(self, request: Submit) -> AsyncIterator[Output]:
        """Outputs of one sequence until the one with a finish_reason.

        Leaving the iterator early (aclose) aborts the sequence. If the engine dies, raises
        UnavailableError if the sequence had begun; else it waits for the next start.
        """
        ...

    async def load_adapter(self, load: LoadLora) -> LoraReply:
        """Read an adapter and accept requests for it. Raises the reason if it cannot be used. The
        client chooses the `op_id`."""
        ...

    async def unload_adapter(self, name: AdapterName) -> LoraReply:
        """Stop accepting requests for an adapter. Raises NotFoundError for an unknown name."""
        ...

    @property
    def adapters(self) -> AdapterTable:
        """The names that take requests."""
        ...

    @property
    def is_paused(self) -> bool:
        """True while new sequences wait and none is computed."""
        ...

    @property
    def is_asleep(self) -> bool:
        """True while its memory is freed; it cannot serve before `wake`."""
        ...

    async def reset_cache(self) -> ControlReply:
        """Drop all cached prefixes."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no step runs any more; new sequences wait until `resume`."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def update_weights(self, path: str) -> ControlReply:
        """Load other weights of the same model, while paused. Raises the reason if they cannot be
        used."""
        ...

    async def sleep(self, mode: PauseMode) -> None:
        """Pause, and free all memory."""
        ...

    async def wake(self) -> None:
        """Returns when it serves again."""
        ...

    async def look(
        self, *, since_step: int = 0, wants_tree: bool = False, explain_step: int | None = None
    ) -> Snapshot:
        """The engine's current state. Raises UnavailableError if it is dead, or dies meanwhile."""
        ...

    def abort(self, request_id: RequestId) -> bool:
        """End a sequence; its caller gets an error that the engine aborted it. False if it is
        unknown."""
        ...

    def watch(self, watch: EngineWatch) -> None:
        """Report events to `watch`."""
        ...

    async def start(self) -> None:
        """Returns when the engine can serve; raises the reason if it cannot start."""
        ...

    async def wait_until_over(self) -> str:
        """Returns the reason when the engine is dead and will not be started again."""
        ...

    async def close(self) -> None:
        """End the engine and everything it runs."""
        ...


def reply_error(reply: ControlReply | LoraReply) -> ManyrootsError | None:
    """The exception for a reply's error; None if there was none."""
    if reply.error is None:
        return None
    is_of_adapter = isinstance(reply, LoraReply)
    match reply.error_kind:
        case ErrorKind.NOT_FOUND if is_of_adapter:
            return NotFoundError(reply.error, field="lora_name")
        case ErrorKind.REQUEST:
            return RequestError(reply.error, field="lora_path" if is_of_adapter else None)
        case ErrorKind.UNAVAILABLE:
            return UnavailableError(reply.error)
    prefix = "the adapter could not be loaded: " if is_of_adapter else ""
    return ManyrootsError(prefix + reply.error)
