"""One name's entry in the directory of adapters: its files, and the messages that wait for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from manyroots.adapter_names import LoraModule
from manyroots.ids import AdapterName, RequestId
from manyroots.lora.files.combination import FoundPart
from manyroots.messages import LoadLora, PublishLora, UnloadLora


class UseLora(NamedTuple):
    """A request wants the adapter that it names."""

    request_id: RequestId
    name: AdapterName
    """With `@` and a revision, or of a combination, if the request says so."""


AdapterMessage = UseLora | LoadLora | PublishLora | UnloadLora


@dataclass(slots=True)
class AdapterEntry:
    """One name: its files, and the messages that wait until they are read. The scheduler knows its
    content and where its weights are (`lora/registry.py`)."""

    name: AdapterName
    module: LoraModule | None
    """Its files. None: the name has no content yet."""
    combines: tuple[FoundPart, ...] | None = None
    """The parts of the sum that it is; None for an adapter with files."""
    is_reading: bool = False
    load: LoadLora | PublishLora | None = None
    """The load that started the current read; None if a request did."""
    waiting: deque[AdapterMessage] = field(default_factory=deque)
    """Messages that are handled after the read, in their order."""

    @property
    def has_unload(self) -> bool:
        """Whether a waiting message unloads the name."""
        return any(isinstance(message, UnloadLora) for message in self.waiting)
