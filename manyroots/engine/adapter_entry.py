"""One name's entry in the directory of adapters: its files, and the messages that wait for it.

Messages wait in order, and each can be found directly. A caller may disconnect while thousands of
requests wait for as many adapters; removing one does not scan the others. Knows no reads and no
scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from manyroots.adapter_names import LoraModule
from manyroots.ids import AdapterName, RequestId
from manyroots.lora.files.combination import FoundPart
from manyroots.messages import LoadLora, PublishLora, Submit, UnloadLora

AdapterMessage = Submit | LoadLora | PublishLora | UnloadLora
MessageKey = tuple[bool, int]
"""Whether it is a request, and its number."""


class WaitingMessages:
    """Messages that wait for one name. Requests are also in `where`, which all names share."""

    def __init__(self, where: dict[RequestId, WaitingMessages]) -> None:
        self._where = where
        self._messages: OrderedDict[MessageKey, AdapterMessage] = OrderedDict()
        self._num_unloads = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[AdapterMessage]:
        return iter(self._messages.values())

    @property
    def has_unload(self) -> bool:
        return self._num_unloads > 0

    @property
    def first(self) -> AdapterMessage:
        """The next message; there is at least one."""
        return next(iter(self._messages.values()))

    def append(self, message: AdapterMessage) -> None:
        self._messages[_key(message)] = message
        if isinstance(message, Submit):
            self._where[message.request_id] = self
        self._num_unloads += isinstance(message, UnloadLora)

    def append_first(self, message: AdapterMessage) -> None:
        self.append(message)
        self._messages.move_to_end(_key(message), last=False)

    def pop(self) -> AdapterMessage:
        """Remove and return the next message."""
        _, message = self._messages.popitem(last=False)
        if isinstance(message, Submit):
            del self._where[message.request_id]
        self._num_unloads -= isinstance(message, UnloadLora)
        return message

    def remove(self, request_id: RequestId) -> None:
        """Remove a request that waits here."""
        del self._messages[True, request_id]
        del self._where[request_id]


@dataclass(slots=True)
class AdapterEntry:
    """One name: its files, and the messages that wait until they are read. The scheduler knows its
    content and where its weights are (`lora/registry.py`)."""

    name: AdapterName
    module: LoraModule | None
    """Its files. None: the name has no content yet."""
    waiting: WaitingMessages
    combines: tuple[FoundPart, ...] | None = None
    """The parts of the sum that it is; None for an adapter with files."""
    is_reading: bool = False
    load: LoadLora | PublishLora | None = None
    """The load that started the current read; None if a request did."""


def _key(message: AdapterMessage) -> MessageKey:
    if isinstance(message, Submit):
        return True, message.request_id
    return False, message.op_id
