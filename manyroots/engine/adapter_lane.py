"""Messages that wait for an adapter's files to be read, in their order, each found at once.

A caller may leave while thousands wait for as many adapters: taking one out walks over none of the
others. Knows no reads and no scheduler.
"""

from __future__ import annotations

from collections import OrderedDict

from manyroots.ids import RequestId
from manyroots.messages import LoadLora, Submit, UnloadLora

Message = Submit | LoadLora | UnloadLora
Key = tuple[bool, int]
"""Whether it is a request, and its number."""


class WaitingMessages:
    """What waits for one name. Requests are also in `where`, which all names share."""

    def __init__(self, where: dict[RequestId, WaitingMessages]) -> None:
        self._where = where
        self._messages: OrderedDict[Key, Message] = OrderedDict()
        self._num_unloads = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def has_unload(self) -> bool:
        return self._num_unloads > 0

    @property
    def first(self) -> Message:
        """The next one; there is at least one."""
        return next(iter(self._messages.values()))

    def append(self, message: Message) -> None:
        self._messages[_key(message)] = message
        if isinstance(message, Submit):
            self._where[message.request_id] = self
        self._num_unloads += isinstance(message, UnloadLora)

    def append_first(self, message: Message) -> None:
        self.append(message)
        self._messages.move_to_end(_key(message), last=False)

    def pop(self) -> Message:
        """Take the next one."""
        _, message = self._messages.popitem(last=False)
        if isinstance(message, Submit):
            del self._where[message.request_id]
        self._num_unloads -= isinstance(message, UnloadLora)
        return message

    def remove(self, request_id: RequestId) -> None:
        """Take out a request that waits here."""
        del self._messages[True, request_id]
        del self._where[request_id]


def _key(message: Message) -> Key:
    if isinstance(message, Submit):
        return True, message.request_id
    return False, message.op_id
