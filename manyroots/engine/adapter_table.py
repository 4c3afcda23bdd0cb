"""Which adapters callers may name, as the API's process knows it.

A mirror of the engine's directory, which decides: it refuses a request whose adapter was unloaded
since it was sent. Only clients of engines change the table, after the engine's replies. It keeps
the source of each name, because a new process of an engine needs it again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from manyroots.adapter_names import LoraModule, is_combination, split_revision
from manyroots.errors import NotFoundError
from manyroots.ids import AdapterName
from manyroots.messages import LoadLora

MAX_NAMES = 100_000
"""Above this, the oldest names that the engine found in --lora-source are not listed."""
UPLOADED = "(uploaded)"
"""What is shown as an uploaded adapter's path."""


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """One name that takes requests."""

    name: AdapterName
    path: str
    """As it is shown."""
    source: LoraModule | LoadLora | None
    """The flag or the load that gave it. None: the engine found it in --lora-source."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def parent(self) -> str | None:
        """What is shown as its base model; None for the served one."""
        return self.source.base_model_name if isinstance(self.source, LoraModule) else None


class AdapterTable:
    """Names in the order in which they came. Replicas share one."""

    def __init__(self, modules: Iterable[LoraModule] = ()) -> None:
        self._by_name: dict[AdapterName, KnownAdapter] = {}
        for module in modules:
            self._put(KnownAdapter(AdapterName(module.name), module.path, module))

    def __iter__(self) -> Iterator[KnownAdapter]:
        return iter(self._by_name.values())

    def get(self, name: str) -> KnownAdapter | None:
        return self._by_name.get(AdapterName(name))

    @property
    def modules(self) -> tuple[LoraModule, ...]:
        """What an engine is started with."""
        return tuple(known.source for known in self if isinstance(known.source, LoraModule))

    @property
    def loads(self) -> list[LoadLora]:
        """What a new process of an engine must load before it serves."""
        return [known.source for known in self if isinstance(known.source, LoadLora)]

    def loaded(self, load: LoadLora, path: str) -> None:
        """The engine takes requests for a name."""
        self._put(KnownAdapter(load.name, UPLOADED if load.is_upload else path, load))

    def found(self, asked: AdapterName) -> None:
        """The engine has answered a request that names this."""
        name = AdapterName(split_revision(asked)[0])
        if name in self._by_name or is_combination(asked):
            return
        if len(self._by_name) >= MAX_NAMES:
            oldest = next((known.name for known in self if known.source is None), None)
            if oldest is None:
                return
            del self._by_name[oldest]
        self._put(KnownAdapter(name, name, None))

    def forget(self, name: AdapterName) -> None:
        """The engine has unloaded a name."""
        self._by_name.pop(name, None)

    @contextmanager
    def unloading(self, name: AdapterName) -> Iterator[None]:
        """Refuse requests for a name while the engine unloads it. If that fails, the name returns,
        unless it was loaded again since."""
        known = self._by_name.pop(name, None)
        try:
            yield
        except NotFoundError:
            raise
        except Exception:
            if known is not None:
                self._by_name.setdefault(name, known)
            raise

    def _put(self, known: KnownAdapter) -> None:
        self._by_name[known.name] = known
