"""An engine in another process, for the API.

Gives `EngineClient`. Passes messages both ways, and restarts the process if it dies. Requests that
had started fail with the reason; waiting requests go to the next process; adapters loaded at run
time are loaded again. After a few deaths in a row it gives up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from manyroots.config import EngineSettings
from manyroots.engine.adapter_table import AdapterTable
from manyroots.engine.child import Child
from manyroots.engine.client import (
    NO_COUNTS,
    EngineDiedError,
    EngineWatch,
    PauseMode,
    reply_error,
)
from manyroots.engine.weight_folders import find_weights
from manyroots.engine.wire import MessageKind
from manyroots.errors import ManyrootsError, UnavailableError
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import (
    Abort,
    Batch,
    Control,
    ControlKind,
    ControlReply,
    EngineInfo,
    LoadLora,
    LoraReply,
    Output,
    PageChange,
    Stats,
    Submit,
    UnloadLora,
)
from manyroots.process.progress import Progress
from manyroots.snapshot import Snapshot, SnapshotAsk

logger = logging.getLogger("manyroots")

FIRST_PAUSE_S = 1.0
"""Delay before the first restart; each further one waits twice as long."""
GOOD_LIFE_S = 300.0
"""After a process has served this long, its death counts as the first in a row again."""
POLL_S = 0.02
SHUTTING_DOWN = "The server is shutting down; ask another one."


class _Mailbox:
    """A queue with one reader and no limit: a third of asyncio's cost, once for every token."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Output | UnavailableError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Output | UnavailableError) -> None:
        self._items.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> Output | UnavailableError:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


@dataclass(slots=True)
class _Request:
    submit: Submit
    outputs: _Mailbox = field(default_factory=_Mailbox)
    """An error is the reason that no more outputs follow."""
    has_begun: bool = False
    has_outputs: bool = False


class ProcessClient:
    """Owns an engine process, and its successors."""

    def __init__(
        self,
        settings: EngineSettings,
        adapters: AdapterTable | None = None,
        *,
        max_restarts: int = 0,
        first_pause_s: float = FIRST_PAUSE_S,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        make_child: Callable[[], Child] = Child,
        hands_back: bool = False,
        on_life: Callable[[bool], None] = lambda is_serving: None,
        on_pages: Callable[[list[PageChange]], None] = lambda changes: None,
    ) -> None:
        """`adapters`: the table that replicas share; None for one of its own. `max_restarts`: how
        often in a row a dead process is started again. `hands_back`: if the process dies, waiting
        requests also fail with EngineDiedError, because another engine can take them. `on_life`:
        called when it starts or stops serving. `on_pages`: called with added and removed pages."""
        self._make_child = make_child
        self._hands_back = hands_back
        self._on_life = on_life
        self._on_pages = on_pages
        self.heard_at = time.monotonic()
        """The time of the process's last message."""
        self._settings = settings
        self._max_restarts = max_restarts
        self._first_pause_s = first_pause_s
        self._on_progress = on_progress
        self._ids = itertools.count(1)
        self._requests: dict[RequestId, _Request] = {}
        self._op_ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        """By the number of the operation whose reply is awaited."""
        self.adapters = AdapterTable(settings.lora.lora_modules) if adapters is None else adapters
        self._watch: EngineWatch | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._woken = asyncio.Event()
        self.is_asleep = False
        self._weights_path: str | None = None
        """The folder of the current weights, if they were updated after the start."""
        self._info: EngineInfo | None = None
        self._stats: Stats | None = None
        self._child: Child | None = None
        self._is_serving = False
        self._cause: str | None = None
        """The reason of the last process's death."""
        self._over: asyncio.Future[str] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self.progress: Progress | None = None
        self.num_restarts = 0
        self._died_at = 0.0

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("the engine is still loading; try again in a moment")
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._is_serving

    @property
    def is_over(self) -> bool:
        return self._over is not None and self._over.done()

    @property
    def stats(self) -> Stats | None:
        if self._is_serving or self._info is None:
            return self._stats
        # Its pages and rows died with the process; waiting requests are here.
        return replace(NO_COUNTS, num_waiting=len(self._requests))

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._ids))

    async def start(self) -> None:
        self._over = asyncio.get_running_loop().create_future()
        self._info = await self._start_child(self._as_before())
        if not self._loads_first:
            self._set_serving(True)
        self._supervisor = asyncio.create_task(self._supervise())
        self._supervisor.add_done_callback(self._supervision_ended)

    @property
    def _loads_first(self) -> bool:
        """Whether a new process must load adapters before it serves."""
        return bool(self.adapters.loads)

    async def wait_until_over(self) -> str:
        assert self._over is not None
        return await asyncio.shield(self._over)

    async def generate(self, request: Submit) -> AsyncIterator[Output]:
        self._serving_child()
        await self._resumed.wait()
        child = self._serving_child()
        mine = self._requests[request.request_id] = _Request(request)
        try:
            child.send(MessageKind.SUBMIT, request)
            while True:
                output = await mine.outputs.get()
                if isinstance(output, UnavailableError):
                    raise output
                if output.finish_reason is not None:
                    self._requests.pop(request.request_id, None)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            is_open = self._requests.pop(request.request_id, None) is not None
            if is_open and self._is_serving:
                self._serving_child().send(MessageKind.ABORT, Abort([request.request_id]))

    async def load_adapter(self, load: LoadLora) -> LoraReply:
        reply = await self.ask_load(load)
        self.adapters.loaded(load, reply.path)
        return reply

    async def unload_adapter(self, name: AdapterName) -> LoraReply:
        with self.adapters.unloading(name):
            return await self.ask_unload(name)

    async def ask_load(self, load: LoadLora) -> LoraReply:
        """Have this process load an adapter; the table is the caller's to change."""
        return cast("LoraReply", await self._ask(MessageKind.LOAD, load))

    async def ask_unload(self, name: AdapterName) -> LoraReply:
        """Have this process unload an adapter; the table is the caller's to change."""
        return cast("LoraReply", await self._ask(MessageKind.UNLOAD, UnloadLora(0, name)))

    def note_weights(self, path: str) -> None:
        """The weights that the next process takes."""
        self._weights_path = str(find_weights(path, self._settings.model.weights_dirs))

    def hand_back_waiting(self, reason: str) -> None:
        """Fail requests that have no outputs, so that another engine can take them."""
        for request_id, request in list(self._requests.items()):
            if not request.has_outputs:
                del self._requests[request_id]
                request.outputs.put(EngineDiedError(reason, has_begun=False))
                if self._is_serving:
                    self._serving_child().send(MessageKind.ABORT, Abort([request_id]))

    @property
    def is_paused(self) -> bool:
        return not self._resumed.is_set()

    async def reset_cache(self) -> ControlReply:
        return await self._control(ControlKind.RESET_CACHE)

    async def pause(self, mode: PauseMode) -> None:
        self._serving_child()
        if mode is PauseMode.WAIT and self.is_paused and self._requests:
            await self._control(ControlKind.RESUME)  # for requests that a pause has kept
        self._resumed.clear()
        if mode is PauseMode.ABORT and self._requests:
            self._serving_child().send(MessageKind.ABORT, Abort(list(self._requests)))
        if mode is not PauseMode.KEEP:
            while self._requests and self._is_serving and self.is_paused:
                await asyncio.sleep(POLL_S)
            if self._is_serving and not self.is_paused:
                raise UnavailableError("the engine was resumed in the meantime; pause it again")
        await self._control(ControlKind.PAUSE)
        self._resumed.clear()  # again: a resume that came before it is answered, too

    async def resume(self) -> None:
        await self._control(ControlKind.RESUME)
        self._resumed.set()

    async def update_weights(self, path: str) -> ControlReply:
        reply = await self._control(ControlKind.UPDATE_WEIGHTS, path)
        self.note_weights(path)
        return reply

    async def sleep(self, mode: PauseMode) -> None:
        if self.is_asleep:
            return
        keeps = mode is PauseMode.KEEP  # nothing could be kept
        await self.pause(PauseMode.WAIT if keeps else mode)
        self._woken.clear()
        self.is_asleep = True
        self._set_serving(False)
        assert self._child is not None
        self._child.send(MessageKind.CLOSE, None)

    async def wake(self) -> None:
        if self.is_asleep:
            self._woken.set()
            while not self._is_serving and not self.is_over:
                await asyncio.sleep(POLL_S)
        await self.resume()

    async def _control(self, kind: ControlKind, path: str = "") -> ControlReply:
        return cast("ControlReply", await self._ask(MessageKind.CONTROL, Control(0, kind, path)))

    async def look(
        self, *, since_step: int = 0, wants_tree: bool = False, explain_step: int | None = None
    ) -> Snapshot:
        ask = SnapshotAsk(0, since_step, wants_tree, explain_step)
        return cast("Snapshot", await self._ask(MessageKind.SNAPSHOT, ask))

    def abort(self, request_id: RequestId) -> bool:
        if request_id not in self._requests or not self._is_serving:
            return False
        self._serving_child().send(MessageKind.ABORT, Abort([request_id]))
        return True

    def watch(self, watch: EngineWatch) -> None:
        self._watch = watch

    async def close(self) -> None:
        self._give_up(SHUTTING_DOWN)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._child is not None:
            child, self._child = self._child, None
            await child.close()

    # One life

    def _set_serving(self, is_serving: bool) -> None:
        if self._is_serving != is_serving:
            self._is_serving = is_serving
            self._on_life(is_serving)

    def _serving_child(self) -> Child:
        if self._is_serving and self._child is not None:
            return self._child
        if self.is_over:
            assert self._over is not None
            raise UnavailableError(self._over.result())
        if self.is_asleep:
            raise UnavailableError("the engine is asleep; wake it with POST /wake_up")
        if self._cause is None:
            raise UnavailableError("the engine is still loading; try again in a moment")
        raise UnavailableError(f"{self._cause}; it is being started again, try again later")

    async def _start_child(self, settings: EngineSettings) -> EngineInfo:
        self._child = self._make_child()
        try:
            return await self._child.start(settings, self._tell_progress)
        finally:
            self.progress = None

    def _tell_progress(self, progress: Progress) -> None:
        self.progress = progress
        self._on_progress(progress)

    async def _ask(self, kind: Any, message: Any, child: Child | None = None) -> Any:
        """The reply to a message, which gets a number of its own; raises the reply's error."""
        child, number = child or self._serving_child(), next(self._op_ids)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            child.send(kind, replace(message, op_id=number))
            return await answer
        finally:
            del self._asked[number]

    def _answer(self, number: int, reply: Any, error: Exception | None = None) -> None:
        answer = self._asked.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(reply)
        else:
            answer.set_exception(error)

    def _take(self, kind: MessageKind, body: Any) -> None:
        self.heard_at = time.monotonic()
        if kind is MessageKind.BEGUN:
            for request_id in body:
                if (mine := self._requests.get(request_id)) is not None:
                    mine.has_begun = True
                    if self._watch is not None:
                        self._watch.begun(request_id)
            return
        if kind is MessageKind.SEEN:
            self._answer(body.op_id, body)
            return
        assert isinstance(body, Batch)
        self._stats = body.stats
        if body.pages:
            self._on_pages(body.pages)
        for output in body.outputs:
            if (mine := self._requests.get(output.request_id)) is not None:
                mine.has_begun = mine.has_outputs = True
                mine.outputs.put(output)
                if output.revision is not None and mine.submit.adapter is not None:
                    self.adapters.found(mine.submit.adapter)
        replies: list[ControlReply | LoraReply] = [*body.controls, *body.replies]
        for reply in replies:
            self._answer(reply.op_id, reply, reply_error(reply))
        if self._watch is not None:
            self._watch.stepped(body.stats)
            for load in body.loads:
                self._watch.loaded(load)

    # Life after life

    async def _supervise(self) -> None:
        # One that joins others has adapters to load before it serves.
        num_in_a_row, is_first = 0, self._is_serving
        while True:
            assert self._child is not None
            begin = time.monotonic()
            # Beside the messages: it waits for some of them, and stops when they end.
            resuming = asyncio.create_task(self._resume(self._child, is_first=is_first))
            resuming.add_done_callback(self._supervision_ended)
            is_first = False
            try:
                cause = await self._child.live(self._take)
            finally:
                resuming.cancel()
            if self.is_asleep:
                self._end_operations("the engine was put to sleep meanwhile; wake it and try again")
                await self._child.close()
                await self._woken.wait()
                self.is_asleep, num_in_a_row, is_first = False, 0, False
                if await self._started_again():
                    continue
                cause = "the engine could not be woken"
            if time.monotonic() - begin >= GOOD_LIFE_S:
                num_in_a_row = 0
            self._handle_death(cause, self._child.last_lines)
            await self._child.close()
            while True:
                if num_in_a_row >= self._max_restarts:
                    self._give_up(f"{cause}; it was started again {num_in_a_row} times in a row")
                    return
                num_in_a_row += 1
                if await self._restarted(num_in_a_row):
                    break

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """An error in our own supervision: no messages would be read any more, so report it and
        end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the engine can't be watched any more", exc_info=error)
            self._give_up(f"the engine can't be watched any more: {type(error).__name__}: {error}")

    def _handle_death(self, cause: str, last_lines: list[str]) -> None:
        """Log the death and its reason, and fail the requests that died with it."""
        self._set_serving(False)
        self._died_at = time.monotonic()
        self.progress = Progress("Ending what is left of the engine", 0, 1)
        self._cause, self._stats = cause, None
        said = "".join(f"\n    {line}" for line in last_lines)
        logger.error("%s%s", cause, f"; the last it wrote:{said}" if said else "")
        for request_id, request in list(self._requests.items()):
            if request.has_begun or self._hands_back:
                del self._requests[request_id]
                request.outputs.put(EngineDiedError(cause, has_begun=request.has_begun))
        self._end_operations(cause)
        self._resumed.set()  # the next process is not paused

    def _end_operations(self, reason: str) -> None:
        """No reply will come any more."""
        for number in self._asked:
            self._answer(number, None, UnavailableError(reason))

    async def _restarted(self, number: int) -> bool:
        pause_s = self._first_pause_s * 2 ** (number - 1)
        logger.warning(
            "starting the engine again in %g s (%d of %d in a row); %d requests wait",
            pause_s, number, self._max_restarts, len(self._requests),
        )  # fmt: skip
        self.progress = Progress("Waiting to start the engine again", 0, 1)
        await asyncio.sleep(pause_s)
        self.progress = Progress("Starting the engine again", 0, 1)
        self.num_restarts += 1
        is_back = await self._started_again()
        if is_back:
            logger.info(
                "the engine is back, %.1f s after it died", time.monotonic() - self._died_at
            )
        return is_back

    async def _started_again(self) -> bool:
        assert self._info is not None
        before = self._info
        try:
            info = await self._start_child(self._as_before())
            self._info = replace(info, model_path=before.model_path, model_name=before.model_name)
        except ManyrootsError as error:
            logger.error("the engine could not be started again: %s", error)
            assert self._child is not None
            await self._child.close()
            return False
        return True

    def _as_before(self) -> EngineSettings:
        """The same sizes again: running requests were accepted with them."""
        lora = replace(self._settings.lora, lora_modules=self.adapters.modules)
        settings = replace(self._settings, lora=lora)
        info, model = self._info, settings.model
        if self._weights_path is not None:
            own = model.model if info is None else info.model_path
            model = replace(
                model,
                model=self._weights_path,
                load_format="auto",
                tokenizer=model.tokenizer or own,
            )
        if info is None:
            return replace(settings, model=model)
        return replace(
            settings,
            model=replace(model, max_model_len=info.max_model_len),
            cache=replace(settings.cache, num_gpu_blocks_override=info.num_pages),
        )

    async def _resume(self, child: Child, *, is_first: bool) -> None:
        """Load the adapters of the table again, then submit the waiting requests."""
        if is_first:
            return
        done: dict[AdapterName, LoadLora] = {}
        # The table may get more while these load.
        while missing := [load for load in self.adapters.loads if done.get(load.name) != load]:
            again = (replace(load, in_place=True) for load in missing)
            asked = (self._ask(MessageKind.LOAD, load, child) for load in again)
            replies = await asyncio.gather(*asked, return_exceptions=True)
            for load, reply in zip(missing, replies, strict=True):
                done[load.name] = load
                if isinstance(reply, BaseException):
                    logger.error("adapter %s could not be loaded again: %s", load.name, reply)
        for request in self._requests.values():
            child.send(MessageKind.SUBMIT, request.submit)
        self._set_serving(True)
        logger.info("the engine serves again; %d requests had waited", len(self._requests))

    def _give_up(self, reason: str) -> None:
        self._set_serving(False)
        self.progress = None
        if self._over is not None and not self._over.done():
            self._over.set_result(reason)
        for request in self._requests.values():
            request.outputs.put(EngineDiedError(reason, has_begun=request.has_begun))
        self._requests.clear()
        self._end_operations(reason)
        self._resumed.set()
