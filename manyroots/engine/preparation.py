"""Requests until the scheduler has them: each waits for its adapter's files, then for its grammar.

In: submissions, aborts, loads and unloads. Out: requests for the scheduler with their hold on an
adapter, outputs of refused requests, replies to loads and unloads.

All requests that wait here are in one table; the directory and the compiler know only their
numbers. So an abort removes a request from one table, whatever it waits for.

Called by the loop's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from manyroots.adapter_names import LoraModule
from manyroots.engine.adapter_directory import AdapterDirectory
from manyroots.engine.adapter_entry import UseLora
from manyroots.engine.adapter_reads import Reads
from manyroots.errors import NotFoundError, RequestError
from manyroots.ids import AdapterName, RequestId
from manyroots.lora.registry import Hold
from manyroots.messages import (
    ErrorKind,
    FinishReason,
    LoadLora,
    LoadTime,
    LoraReply,
    Notice,
    Output,
    PublishLora,
    StepOutputs,
    Submit,
    UnloadLora,
)
from manyroots.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # simulations have no grammars, and need no library for them
    from manyroots.engine.grammar_compiles import GrammarCompiles

_NO_LORA = "this engine was started without LoRA; start it with --enable-lora."


@dataclass(slots=True)
class WaitingRequest:
    """A request that the scheduler does not have yet."""

    submit: Submit
    hold: Hold | None = None
    """The adapter content that it holds, once that is known. Loads and unloads do not change it
    while the request waits for a grammar."""

    @property
    def needs_adapter(self) -> bool:
        """Whether its adapter's files are being read; else its grammar is being compiled."""
        return self.submit.adapter is not None and self.hold is None


class Preparation:
    """Requests that wait for files or grammars."""

    def __init__(
        self,
        scheduler: Scheduler,
        directory: AdapterDirectory | None,
        compiles: GrammarCompiles | None,
    ) -> None:
        """`directory`: None for adapters that are registered with the scheduler directly.
        `compiles`: None refuses requests whose output has a shape."""
        self._scheduler = scheduler
        self._directory = directory
        self._compiles = compiles
        given = (part for part in (compiles, directory) if part is not None)
        self._reads: list[Reads[Any]] = [part.reads for part in given]
        self.waiting: dict[RequestId, WaitingRequest] = {}
        self._notices: dict[RequestId, Notice] = {}
        """What a request's first output says of its adapter."""
        self._outputs: list[Output] = []
        self._replies: list[LoraReply] = []

    # State

    @property
    def has_outcomes(self) -> bool:
        """Whether `poll` or `take_replies` has anything to give."""
        if self._outputs or self._replies:
            return True
        if self._directory is not None and self._directory.has_outcomes:
            return True
        return any(reads.has_finished for reads in self._reads)

    @property
    def is_reading(self) -> bool:
        """Whether an adapter's files are being read, or a grammar is being compiled."""
        return any(reads.num_under_way for reads in self._reads)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a read ends or until the timeout; only while `is_reading`."""
        next(reads for reads in self._reads if reads.num_under_way).wait(timeout_s)

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on another thread, whenever a read ends."""
        for reads in self._reads:
            reads.wake = wake

    # Messages

    def note(self, module: LoraModule) -> None:
        """Register an adapter's name; its files are read on first use."""
        if self._directory is None:
            raise RequestError(_NO_LORA, field="lora_request")
        self._directory.note(module)

    def handle(self, message: LoadLora | PublishLora | UnloadLora) -> None:
        if self._directory is not None:
            self._directory.handle(message)
            return
        self._replies.append(LoraReply(message.op_id, error=_NO_LORA, error_kind=ErrorKind.REQUEST))

    def submit(self, submit: Submit) -> None:
        """Hand a request to the scheduler, now or as soon as it has what it needs."""
        number, adapter = submit.request_id, submit.adapter
        shape = submit.sampling.structured_outputs
        if adapter is None and shape is None:
            self._scheduler.submit(submit)
            return
        self.waiting[number] = WaitingRequest(submit)
        if shape is not None:
            if self._compiles is None:
                self._refuse(number, "this engine gives no structured output.", ErrorKind.REQUEST)
                return
            self._compiles.begin(shape)  # beside the adapter's files
        if adapter is None:
            self._with_adapter(number, None)
        elif self._directory is None:
            self._take_registered(number, adapter)
        else:
            if (was := self._directory.where(adapter)) is not None:
                self._notices[number] = Notice(adapter_was=was)
            self._directory.handle(UseLora(number, adapter))
            self._take_adapters(self._directory)

    def abort(self, request_id: RequestId) -> bool:
        """End a request that waits here; False if none does."""
        if request_id not in self.waiting:
            return False
        self._end(Output(request_id, [], FinishReason.ABORT, 0))
        return True

    # Outcomes

    def poll(self) -> list[Output]:
        """Handle finished reads and compilations. Returns the outputs of requests that were
        refused or aborted."""
        if self._compiles is not None and self._compiles.reads.has_finished:
            self._take_grammars(self._compiles)
        if self._directory is not None and self._directory.has_outcomes:
            self._directory.poll()
            self._take_adapters(self._directory)
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_replies(self) -> list[LoraReply]:
        """Replies to loads and unloads since the last call."""
        replies, self._replies = self._replies, []
        return replies if self._directory is None else replies + self._directory.take_replies()

    def take_read_times(self) -> list[LoadTime]:
        return [] if self._directory is None else self._directory.take_read_times()

    def pass_on(self, outputs: StepOutputs) -> None:
        """Handle outputs that leave the engine: the first of a request gets its adapter's tier, and
        the last releases its grammar."""
        if self._notices:
            outputs.single_out(self._notices)
            for output in outputs.outputs:
                if (mine := self._notices.pop(output.request_id, None)) is not None:
                    was, revision = mine.adapter_was, mine.revision
                    notice = output.notice or Notice()
                    output.notice = replace(notice, adapter_was=was, revision=revision)
        if self._compiles is not None:
            self._compiles.release(outputs.outputs)

    def close(self) -> None:
        for part in (self._directory, self._compiles):
            if part is not None:
                part.close()

    # Inside

    def _take_registered(self, number: RequestId, adapter: AdapterName) -> None:
        try:
            hold = self._scheduler.adapters.acquire(adapter)
        except NotFoundError as error:
            self._refuse(number, str(error), ErrorKind.NOT_FOUND)
        else:
            self._with_adapter(number, hold)

    def _take_adapters(self, directory: AdapterDirectory) -> None:
        for number, outcome in directory.take_outcomes():
            if isinstance(outcome, Output):
                self._end(outcome)
            else:
                self._with_adapter(number, outcome)

    def _take_grammars(self, compiles: GrammarCompiles) -> None:
        for number, outcome in compiles.poll():
            if isinstance(outcome, Output):
                self._end(outcome)
            elif (waiting := self.waiting.pop(number, None)) is not None:
                compiles.hold(number, outcome)
                self._scheduler.submit(waiting.submit, waiting.hold)

    def _with_adapter(self, number: RequestId, hold: Hold | None) -> None:
        """A request has its adapter; it may still have to wait for its grammar."""
        waiting = self.waiting.get(number)
        if waiting is None:  # aborted
            if hold is not None:
                self._scheduler.release_adapter(hold)
            return
        waiting.hold = hold
        if hold is not None:
            said = self._notices.get(number) or Notice()
            self._notices[number] = replace(said, revision=hold.version.revision)
        shape = waiting.submit.sampling.structured_outputs
        if shape is not None:
            assert self._compiles is not None
            if not self._compiles.is_there(number, shape):
                return
        del self.waiting[number]
        self._scheduler.submit(waiting.submit, hold)

    def _end(self, output: Output) -> None:
        """A request is over before the scheduler had it, unless it was aborted before."""
        waiting = self.waiting.pop(output.request_id, None)
        if waiting is not None:
            self._outputs.append(output)
            if waiting.hold is not None:
                self._scheduler.release_adapter(waiting.hold)

    def _refuse(self, number: RequestId, reason: str, kind: ErrorKind) -> None:
        notice = Notice(error_kind=kind)
        self._end(Output(number, [], FinishReason.ERROR, 0, error=reason, notice=notice))
