"""The seam that the API and `LLM` see: submit sequences, receive outputs.

`ProcessClient` (engine/process_client.py) speaks to an engine in another process; tests use a
fake through the same protocol.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from typing import Protocol

from manyroots.errors import ManyrootsError, NotFoundError, RequestError, UnavailableError
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import (
    ControlReply,
    EngineInfo,
    ErrorKind,
    LoadTime,
    LoraReply,
    Output,
    Stats,
    Submit,
)
from manyroots.process.progress import Progress
from manyroots.snapshot import Snapshot

NO_COUNTS = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Of an engine that has nothing: before its first step, and while its process is gone."""


class EngineDiedError(UnavailableError):
    """The engine that had a request is dead."""

    def __init__(self, reason: str, *, has_begun: bool) -> None:
        """`has_begun`: it had begun to compute the request, which may be what killed it."""
        super().__init__(reason)
        self.has_begun = has_begun


class PauseMode(enum.Enum):
    """What a pause does with sequences that have begun."""

    KEEP = "keep"
    """They stop where they are, and go on later."""
    WAIT = "wait"
    """They finish first."""
    ABORT = "abort"
    """They end with an error."""


class EngineWatch(Protocol):
    """Who wants to know what the engine does, for whoever looks at the server."""

    def loaded(self, load: LoadTime) -> None:
        """An adapter was brought nearer."""

    def begun(self, request_id: RequestId) -> None:
        """A sequence begins to compute, perhaps again."""

    def stepped(self, stats: Stats) -> None:
        """The counts after a step."""


class EngineClient(Protocol):
    """An engine as the API sees it. All methods belong to one event loop."""

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
        """It is dead, and will not be started again."""
        ...

    @property
    def progress(self) -> Progress | None:
        """How far a start has come; None if none is under way, or it has not said yet."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often a dead engine was started again."""
        ...

    @property
    def stats(self) -> Stats | None:
        """The newest counts, None before the first step. Of a dead engine: none but who waits."""
        ...

    def next_request_id(self) -> RequestId:
        """A number no other sequence of this engine has."""
        ...

    def generate(self, request: Submit) -> AsyncIterator[Output]:
        """Outputs of one sequence until the one with a finish_reason.

        Leaving the iterator early (aclose) aborts the sequence. If the engine dies, raises
        UnavailableError if the sequence had begun; else it waits for the next start.
        """
        ...

    async def load_adapter(
        self,
        name: AdapterName,
        path: str,
        *,
        is_pinned: bool,
        in_place: bool,
        is_upload: bool = False,
    ) -> LoraReply:
        """Read an adapter and take requests for it. Raises why it can't be used. `is_upload`: the
        server has put it there, whatever folders callers may name."""
        ...

    async def unload_adapter(self, name: AdapterName) -> LoraReply:
        """Take no new requests for an adapter. Raises NotFoundError if there is no such name."""
        ...

    @property
    def is_paused(self) -> bool:
        """New sequences wait, and none is computed."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Its memory is given back; it can't answer before it is woken."""
        ...

    async def reset_cache(self) -> ControlReply:
        """Forget what could be reused."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Return when no step runs any more; new sequences wait until `resume`."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def update_weights(self, path: str) -> ControlReply:
        """Take other weights of the same model, while paused. Raises why they can't be used."""
        ...

    async def sleep(self, mode: PauseMode) -> None:
        """Pause, and give all memory back."""
        ...

    async def wake(self) -> None:
        """Return when it serves again."""
        ...

    async def look(
        self, *, since_step: int = 0, wants_tree: bool = False, explain_step: int | None = None
    ) -> Snapshot:
        """What the engine does now. Raises UnavailableError if it is gone, or goes meanwhile."""
        ...

    def abort(self, request_id: RequestId) -> bool:
        """End a sequence: its caller is told that the engine gave it up. False if it is unknown."""
        ...

    def watch(self, watch: EngineWatch) -> None:
        """Have `watch` told of what happens."""
        ...

    async def start(self) -> None:
        """Return when the engine can serve; raise what kept it from starting."""
        ...

    async def wait_until_over(self) -> str:
        """Return why, when the engine is dead and will not be started again."""
        ...

    async def close(self) -> None:
        """End the engine and everything it runs."""
        ...


def control_error(reply: ControlReply) -> ManyrootsError | None:
    """What a reply's error means to whoever asked; None if all went well."""
    if reply.error is None:
        return None
    if reply.error_kind is ErrorKind.REQUEST:
        return RequestError(reply.error, field=None)
    return ManyrootsError(reply.error)


def lora_error(reply: LoraReply) -> ManyrootsError | None:
    """What a reply's error means to whoever asked; None if all went well."""
    if reply.error is None:
        return None
    match reply.error_kind:
        case ErrorKind.NOT_FOUND:
            return NotFoundError(reply.error, field="lora_name")
        case ErrorKind.UNAVAILABLE:
            return UnavailableError(reply.error)
        case ErrorKind.REQUEST:
            return RequestError(reply.error, field="lora_path")
    return ManyrootsError(f"the adapter could not be loaded: {reply.error}")
