"""The adapters of a trace: which are loaded, and what each name means now.

Every name is loaded when the run begins. A fault may unload it and load it again with other
content, or the same, while its requests run.
"""

from __future__ import annotations

from manyroots.ids import AdapterDigest, AdapterName, Namespace
from manyroots.lora.spec import AdapterSpec
from manyroots.scheduler.scheduler import Scheduler
from manyroots.simulate.costs import CostModel
from manyroots.simulate.trace import Trace, TraceRequest
from manyroots.simulate.traffic import adapter_digest

RANK = 16


class TraceAdapters:
    """Loads and unloads through the scheduler, as the server does."""

    def __init__(self, scheduler: Scheduler, costs: CostModel, trace: Trace) -> None:
        self._scheduler = scheduler
        self._num_bytes = int(costs.adapter_bytes)
        self._digests: dict[str, AdapterDigest] = {}
        """Of the names that are loaded now."""
        self.num_reloads = 0
        names = dict.fromkeys(line.adapter for line in trace if line.adapter is not None)
        for name in names:
            self._load(name, content=0)

    def is_loaded(self, name: str | None) -> bool:
        """Whether a request for this could begin; the base model is always there."""
        return name is None or name in self._digests

    def namespace(self, line: TraceRequest) -> Namespace:
        """Where a request that comes now belongs."""
        digest = None if line.adapter is None else self._digests[line.adapter]
        return Namespace(adapter=digest, salt=line.salt)

    def unload(self, name: str) -> None:
        if name in self._digests:
            self._scheduler.unload_adapter(AdapterName(name))
            del self._digests[name]

    def reload(self, name: str, *, content: int) -> None:
        """Load a name again; without an `unload` before, it is replaced on the spot."""
        self._load(name, content)
        self.num_reloads += 1

    def _load(self, name: str, content: int) -> None:
        digest = adapter_digest(name, content)
        self._digests[name] = digest
        spec = AdapterSpec(digest, RANK, self._num_bytes)
        self._scheduler.load_adapter(AdapterName(name), spec, path=name)
