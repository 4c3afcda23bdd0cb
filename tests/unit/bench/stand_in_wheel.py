"""The part of a scheduler wheel's interface that the bench uses, without reuse or a budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class SchedulerConfig:
    page_size = 0


@dataclass
class RequestSpec:
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)


class ExecutionEvent:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def add_event(self, event: Any) -> None:
        self.events.append(event)


class ForwardEvent:
    class ExtendResult:
        request_id = ""
        tokens: list[int] = []

    class Finish:
        request_id = ""


@dataclass
class Forward:
    request_ids: list[str]
    input_lengths: list[int]
    prefill_lengths: list[int]
    extend_prefix_lens: list[int]

    def num_extends(self) -> int:
        return len(self.prefill_lengths)


@dataclass
class ExecutionPlan:
    forward: list[Forward]


class Scheduler:
    """Starts all requests that fit the batch in one step; started requests decode."""

    def __init__(self, config: Any) -> None:
        self._batch = config.max_batch_size
        self._waiting: list[RequestSpec] = []
        self._running: list[str] = []

    def submit_requests(self, specs: list[RequestSpec]) -> None:
        self._waiting.extend(specs)

    def next_execution_plan(self) -> ExecutionPlan:
        room = self._batch - len(self._running)
        new, self._waiting = self._waiting[:room], self._waiting[room:]
        lengths = [len(spec.tokens) for spec in new]
        names = [spec.request_id for spec in new] + self._running
        self._running += [spec.request_id for spec in new]
        ones = [1] * (len(names) - len(new))
        return ExecutionPlan([Forward(names, lengths + ones, lengths, [0] * len(new))])

    def advance(self, event: ExecutionEvent) -> None:
        for each in event.events:
            if isinstance(each, ForwardEvent.Finish):
                self._running.remove(each.request_id)
