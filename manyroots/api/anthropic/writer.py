"""An answer's events become content blocks, and the events that tell of them.

Takes what the model says as it comes; gives Anthropic's streaming events in order, and the blocks
that they add up to. A whole message is made of the same blocks.
"""

from __future__ import annotations

from typing import Any

from manyroots.text.chat_messages import parsed_arguments
from manyroots.text.chat_output import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegins,
)

BlockEvent = dict[str, Any]
SIGNATURE = "unsigned"
"""Of thinking blocks. Nothing is signed, but clients send back only blocks with a signature."""


class BlockWriter:
    """One answer, from its first event to its last."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._arguments = ""

    def add(self, said: ChatEvent) -> list[BlockEvent]:
        match said:
            case ReasoningDelta():
                events = self._opened({"type": "thinking", "thinking": "", "signature": ""})
                self.blocks[-1]["thinking"] += said.text
                return [*events, self._delta({"type": "thinking_delta", "thinking": said.text})]
            case ContentDelta():
                events = self._opened({"type": "text", "text": "", "citations": []})
                self.blocks[-1]["text"] += said.text
                return [*events, self._delta({"type": "text_delta", "text": said.text})]
            case ToolCallBegins():
                block = {"type": "tool_use", "id": said.id, "name": said.name, "input": {}}
                return [*self.close(), self._open(block | {"caller": {"type": "direct"}})]
            case ToolCallArguments():
                self._arguments += said.text
                return [self._delta({"type": "input_json_delta", "partial_json": said.text})]

    def close(self) -> list[BlockEvent]:
        """End the block that is open, if one is."""
        if not self._is_open:
            return []
        self._is_open = False
        block, events = self.blocks[-1], []
        if block["type"] == "tool_use":
            block["input"] = parsed_arguments(self._arguments)
        elif block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _opened(self, block: dict[str, Any]) -> list[BlockEvent]:
        """An open block of this type, which may have to begin."""
        if self._is_open and self.blocks[-1]["type"] == block["type"]:
            return []
        return [*self.close(), self._open(block)]

    def _open(self, block: dict[str, Any]) -> BlockEvent:
        self.blocks.append(block)
        self._is_open = True
        self._arguments = ""
        place = len(self.blocks) - 1
        return {"type": "content_block_start", "index": place, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> BlockEvent:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}
