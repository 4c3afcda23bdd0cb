"""An answer's events become a response's items, and the events that tell of them.

Takes what the model says as it comes; gives OpenAI's streaming events in order, and the items that
they add up to. A whole response is made of the same items.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from manyroots.api.openai_responses.shapes import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from manyroots.api.openai_responses.tools import CallersTool, input_of
from manyroots.text.chat_output import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegins,
)

Event = tuple[str, dict[str, Any]]
"""Its type, and its other fields."""


class ItemWriter:
    """One answer, from its first event to its last."""

    def __init__(self, tools: Mapping[str, CallersTool]) -> None:
        """`tools`: by their names in the chat."""
        self._tools = tools
        self._arguments = ""
        """Of the custom tool's call that is open."""
        self.items: list[OutputItem] = []
        self._is_open = False

    def add(self, said: ChatEvent, logprobs: list[Any]) -> list[Event]:
        """`logprobs`: of the tokens after this, if they are requested."""
        match said:
            case ReasoningDelta():
                events, item = self._opened(OutputReasoning)
                item.content[0].text += said.text
                return [*events, self._delta("response.reasoning_text.delta", said.text)]
            case ContentDelta():
                events, item = self._opened(OutputMessage)
                item.content[0].text += said.text
                item.content[0].logprobs += logprobs
                kind, fields = self._delta("response.output_text.delta", said.text)
                return [*events, (kind, fields | {"logprobs": logprobs})]
            case ToolCallBegins():
                return [*self.close(), self._open(self._call(said))]
            case ToolCallArguments():
                call_item = self.items[-1]
                if isinstance(call_item, OutputCustomCall):
                    self._arguments += said.text  # its input is known when they are whole
                    return []
                assert isinstance(call_item, OutputCall)
                call_item.arguments += said.text
                kind = "response.function_call_arguments.delta"
                fields = {"item_id": call_item.id, "output_index": self._place, "delta": said.text}
                return [(kind, fields)]

    def _call(self, begun: ToolCallBegins) -> OutputCall | OutputCustomCall:
        tool = self._tools.get(begun.name)
        call: OutputCall | OutputCustomCall
        if tool is not None and tool.is_custom:
            self._arguments = ""
            call = OutputCustomCall(id=_new_id("ctc"), call_id=begun.id, name=tool.name)
        else:
            name = begun.name if tool is None else tool.name
            call = OutputCall(id=_new_id("fc"), call_id=begun.id, name=name)
        if tool is not None and tool.namespace is not None:
            call.namespace = tool.namespace
        return call

    def close(self, status: str = "completed") -> list[Event]:
        """End the item that is open, if one is."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item.status = status
        events: list[Event] = []
        where: dict[str, Any] = {"item_id": item.id, "output_index": self._place}
        match item:
            case OutputMessage():
                part = item.content[0]
                done = {"text": part.text, "logprobs": part.logprobs}
                events.append(("response.output_text.done", where | {"content_index": 0} | done))
            case OutputReasoning():
                fields = where | {"content_index": 0, "text": item.content[0].text}
                events.append(("response.reasoning_text.done", fields))
            case OutputCall():
                done = {"name": item.name, "arguments": item.arguments}
                events.append(("response.function_call_arguments.done", where | done))
            case OutputCustomCall():
                item.input = input_of(self._arguments)
                kind = "response.custom_tool_call_input"
                events.append((f"{kind}.delta", where | {"delta": item.input}))
                events.append((f"{kind}.done", where | {"input": item.input}))
        if isinstance(item, OutputMessage | OutputReasoning):
            fields = where | {"content_index": 0, "part": _copy(item.content[0])}
            events.append(("response.content_part.done", fields))
        place = {"output_index": self._place, "item": _copy(item)}
        return [*events, ("response.output_item.done", place)]

    @property
    def _place(self) -> int:
        return len(self.items) - 1

    def _opened(self, kind: type[Any]) -> tuple[list[Event], Any]:
        """An open item of this kind, which may have to begin."""
        if self._is_open and isinstance(self.items[-1], kind):
            return [], self.items[-1]
        prefix = "msg" if kind is OutputMessage else "rs"
        events = [*self.close(), self._open(kind(id=_new_id(prefix)))]
        part = OutputText() if kind is OutputMessage else ReasoningText()
        item = self.items[-1]
        assert isinstance(item, OutputMessage | OutputReasoning)
        fields = {"item_id": item.id, "output_index": self._place, "content_index": 0}
        events.append(("response.content_part.added", fields | {"part": _copy(part)}))
        item.content.append(part)  # type: ignore[arg-type]  # the part of its kind
        return events, item

    def _open(self, item: OutputItem) -> Event:
        item.status = "in_progress"
        self.items.append(item)
        self._is_open = True
        return "response.output_item.added", {"output_index": self._place, "item": _copy(item)}

    def _delta(self, kind: str, text: str) -> Event:
        where = {"item_id": self.items[-1].id, "output_index": self._place, "content_index": 0}
        return kind, where | {"delta": text}


def _copy(value: msgspec.Struct) -> Any:
    """As it is now: the item itself goes on."""
    return msgspec.to_builtins(value)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
