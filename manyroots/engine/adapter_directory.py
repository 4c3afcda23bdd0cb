"""The directory of adapters: which names exist, where their files are, and what waits for them.

In: the numbers of requests with the names that they want, loads and unloads. Out: each request's
hold on its adapter once the scheduler knows that, or the output that refuses it; and replies to
loads and unloads.

Names are noted at start and their files are read on first use, so starting with many adapters costs
no more than with few. A read runs on another thread while other requests decode. Messages about one
name are handled in order: later ones wait in the name's entry while it is read. Only requests for
already loaded content pass, because a reload does not affect them.

With --lora-source, an unknown name is looked up when a request first uses it. If there are many
such names, the least recently used are forgotten.

A request that was aborted is still answered; `Preparation`, which owns requests, drops the answer.

Called by the loop's thread alone. Knows no prompt, no tensor and no slot.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from manyroots.adapter_names import (
    LoraModule,
    combined_names,
    is_combination,
    name_fault,
    split_revision,
)
from manyroots.config import LoraSettings
from manyroots.engine.adapter_entry import AdapterEntry, AdapterMessage, UseLora
from manyroots.engine.adapter_reads import Finished, Reads
from manyroots.errors import (
    ManyrootsError,
    NotFoundError,
    RequestError,
    UnavailableError,
)
from manyroots.ids import AdapterDigest, AdapterName, RequestId, Tier
from manyroots.lora.files.combination import (
    FoundPart,
    combined_path,
    content_name,
)
from manyroots.lora.files.memory import MemoryAdapter
from manyroots.lora.registry import Hold
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import (
    ErrorKind,
    FinishReason,
    LoadLora,
    LoadTime,
    LoraReply,
    Notice,
    Output,
    PublishLora,
    UnloadLora,
)
from manyroots.scheduler.scheduler import Scheduler
from manyroots.store.sources.address import is_address
from manyroots.store.sources.sources import AdapterSources, Located

if TYPE_CHECKING:
    from manyroots.store.adapter_weights import AdapterWeights

logger = logging.getLogger(__name__)

NUM_READS = 4
"""Adapters read at once: as many slow folders delay no other, and cold adapters share the cores."""
MAX_LOAD_TIMES = 4096
"""Times of loads that are kept for metrics; an offline engine has none that take them."""
MAX_FOUND_NAMES = 1024
"""Most names found in --lora-source that are known at once."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """How the execute half reads adapters."""

    read: Callable[[Path, Sequence[Path] | None], tuple[AdapterSpec, AdapterWeights]]
    """Reads everything in a folder and checks it against the model; raises errors that a caller may
    see. If folders are given, no link may lead out of them. Called on other threads."""
    keep: Callable[[AdapterWeights], None]
    """Keeps what was just read as the copy in host memory."""
    close: Callable[[], None] = lambda: None
    """Called when nothing more will be read."""
    read_memory: Callable[[MemoryAdapter], tuple[AdapterSpec, AdapterWeights]] | None = None
    """The same for an adapter in memory; None if those are not supported."""
    read_combined: Callable[[Sequence[FoundPart]], tuple[AdapterSpec, AdapterWeights]] | None = None
    """The same for a weighted sum of adapters; None if combining is not supported."""
    sources: AdapterSources | None = None
    """Sources of folders, if the execute half also fetches; None: the directory's own."""


@dataclass(frozen=True, slots=True)
class _Read:
    """The result of a read."""

    located: Located
    spec: AdapterSpec
    weights: AdapterWeights


class AdapterDirectory:
    """Names and their entries."""

    def __init__(
        self,
        settings: LoraSettings,
        scheduler: Scheduler,
        files: AdapterFiles,
        *,
        base_names: Collection[str],
    ) -> None:
        """`base_names`: names of the base model, which no adapter may have."""
        self._lora_dirs = settings.lora_dirs
        self._is_restricted = bool(settings.lora_dirs or settings.lora_source)
        """If false, any folder may be read. Only the process's own code can ask then, since
        endpoints need one of the two settings."""
        self._sources = files.sources or AdapterSources(settings)
        self._found: OrderedDict[AdapterName, None] = OrderedDict()
        """Names found in --lora-source, most recently used last."""
        self._scheduler = scheduler
        self._registry = scheduler.adapters.registry
        """The contents of names whose files were read."""
        self._files = files
        self._base_names = frozenset(base_names)
        self._entries: dict[AdapterName, AdapterEntry] = {}
        self.reads: Reads[_Read] = Reads(NUM_READS)
        self._outcomes: list[tuple[RequestId, Hold | Output]] = []
        self._replies: list[LoraReply] = []
        self._read_times: deque[LoadTime] = deque(maxlen=MAX_LOAD_TIMES)
        for module in settings.lora_modules:
            self.note(module)

    def note(self, module: LoraModule) -> None:
        """Register a name without reading anything."""
        name = AdapterName(module.name)
        if fault := self._name_fault(module.name):
            raise RequestError(fault, field="lora_name")
        entry = self._entries.get(name)
        if entry is None and not module.path:
            raise NotFoundError(
                f"adapter {name!r} is not known; say in which folder it is.", field="lora_path"
            )
        if entry is None:
            self._entries[name] = AdapterEntry(name, module)
        elif entry.module is None or (module.path and module.path != entry.module.path):
            raise RequestError(
                f"adapter {name!r} is known already, from another folder than {module.path!r}; "
                "unload it first, or load it in place.",
                field="lora_path",
            )

    def handle(self, message: AdapterMessage) -> None:
        """Handle a message now, or after earlier messages of the same name."""
        if isinstance(message, UseLora) and is_combination(message.name):
            self._combine(message)
        else:
            self._handle(message)

    def _handle(self, message: AdapterMessage) -> None:
        entry = self._entry_of(message)
        if entry is not None and entry.name in self._found:
            self._found.move_to_end(entry.name)
        if entry is None:
            self._refuse_unknown(message)
        elif isinstance(message, UseLora) and self._is_alive(message) and not entry.has_unload:
            self._give(message)
        elif entry.is_reading:
            entry.waiting.append(message)
        else:
            self._carry_out(entry, message)

    def where(self, name: AdapterName) -> Tier | None:
        """The tier on which a new request finds the weights; None if the name is unknown."""
        name = AdapterName(split_revision(name)[0])
        if name not in self._entries:
            return None
        is_open = name in self._registry.loaded
        return self._scheduler.adapters.whereabouts(name) if is_open else Tier.STORAGE

    @property
    def has_outcomes(self) -> bool:
        return bool(self._outcomes or self._replies or self.reads.has_finished)

    def poll(self) -> None:
        """Handle finished reads."""
        for finished in self.reads.take():
            self._take_in(finished)

    def take_outcomes(self) -> list[tuple[RequestId, Hold | Output]]:
        """Requests that got their adapter, or were refused, since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_replies(self) -> list[LoraReply]:
        replies, self._replies = self._replies, []
        return replies

    def take_read_times(self) -> list[LoadTime]:
        times = list(self._read_times)
        self._read_times.clear()
        return times

    def close(self) -> None:
        self.reads.close()
        self._files.close()

    # Inside

    def _entry_of(self, message: AdapterMessage) -> AdapterEntry | None:
        name = AdapterName(split_revision(message.name)[0])
        entry = self._entries.get(name)
        if entry is not None or self._name_fault(name):
            return entry
        if isinstance(message, LoadLora | PublishLora):
            entry = self._entries[name] = AdapterEntry(name, None)
        elif isinstance(message, UseLora) and self._sources.finds_names:
            entry = self._entries[name] = AdapterEntry(name, LoraModule(name, ""))
            self._found[name] = None
        return entry

    def _is_alive(self, wanted: UseLora) -> bool:
        """Whether a request's adapter can be held now."""
        return self._registry.find(wanted.name) is not None

    def _give(self, wanted: UseLora) -> None:
        """Give a request a hold on its adapter."""
        hold = self._scheduler.adapters.acquire(wanted.name)
        self._outcomes.append((wanted.request_id, hold))

    def _name_fault(self, name: str) -> str | None:
        if name in self._base_names:
            return f"{name!r} is what the base model is called; give the adapter another name."
        return name_fault(name)

    def _carry_out(self, entry: AdapterEntry, message: AdapterMessage) -> None:
        """Handle a message; no read of this name is in progress."""
        match message:
            case UseLora() if is_combination(message.name) and entry.combines is None:
                self._combine(message)
            case UseLora() if self._is_alive(message):
                self._give(message)
            case UseLora() if entry.name in self._registry.loaded:
                self._refuse_unknown(message)  # a revision that is over
            case UseLora() if entry.module is not None:
                entry.waiting.appendleft(message)
                self._begin(entry, entry.module.path, None)
            case LoadLora() if entry.module is None or message.in_place:
                self._begin(entry, message.path, message)
            case PublishLora():
                self._begin(entry, "", message)
            case LoadLora():
                self._reply_error(
                    message.op_id,
                    f"adapter {entry.name!r} exists already; unload it first, or set load_inplace "
                    "to give its name new weights.",
                    ErrorKind.REQUEST,
                )
            case UnloadLora() if entry.module is not None:
                self._unload(entry, message)
            case _:
                self._refuse_unknown(message)

    def _combine(self, wanted: UseLora) -> None:
        """A request for several adapters. Each is read if needed; then the request waits for their
        sum, which has its own name."""
        found: list[FoundPart] = []
        for part in combined_names(wanted.name):
            version = self._registry.find(AdapterName(part.name))
            if version is not None:
                found.append(FoundPart(version.path, version.digest, part.weight))
                continue
            entry = self._entry_of(UseLora(wanted.request_id, AdapterName(part.name)))
            if entry is None or entry.name in self._registry.loaded:  # or a revision that is over
                self._refuse(wanted, _no_such_model(part.name), ErrorKind.NOT_FOUND)
                return
            entry.waiting.append(wanted)
            if not entry.is_reading:
                assert entry.module is not None
                self._begin(entry, entry.module.path, None)
            return
        name = content_name(found)
        if name not in self._entries:
            module = LoraModule(name, combined_path(found))
            self._entries[name] = AdapterEntry(name, module, combines=tuple(found))
            self._found[name] = None
        self._handle(UseLora(wanted.request_id, name))

    def _forget_combinations(self, digest: AdapterDigest) -> None:
        """Drop sums that include content which requests may no longer use."""
        for name in list(self._found):
            entry = self._entries[name]
            is_part = any(part.digest == digest for part in entry.combines or ())
            if is_part and not entry.is_reading and not entry.waiting:
                if name in self._registry.loaded:
                    self._scheduler.unload_adapter(name)
                del self._found[name], self._entries[name]

    def _begin(self, entry: AdapterEntry, path: str, load: LoadLora | PublishLora | None) -> None:
        entry.is_reading, entry.load = True, load
        if entry.combines is not None:
            self.reads.begin(entry, partial(self._read_combined, entry))
            return
        if isinstance(load, PublishLora):
            self.reads.begin(entry, partial(self._read_memory, load))
            return

        def job() -> _Read:
            located = self._locate(entry.name, path, load)
            with self._sources.reading(Path(located.folder)) as folder:
                return _Read(located, *self._files.read(folder, located.allowed_dirs))

        self.reads.begin(entry, job, is_slow=not path or is_address(path))

    def _read_combined(self, entry: AdapterEntry) -> _Read:
        """Runs on a reading thread."""
        assert entry.combines is not None
        assert self._files.read_combined is not None
        assert entry.module is not None
        spec, weights = self._files.read_combined(entry.combines)
        return _Read(Located(entry.module.path, None, "(combined)"), spec, weights)

    def _read_memory(self, load: PublishLora) -> _Read:
        """Runs on a reading thread."""
        assert isinstance(load.adapter, MemoryAdapter)
        assert self._files.read_memory is not None
        spec, weights = self._files.read_memory(load.adapter)
        return _Read(self._sources.keep(load.name, load.adapter), spec, weights)

    def _locate(self, name: AdapterName, path: str, load: LoadLora | None) -> Located:
        """Runs on a reading thread."""
        if load is None and not path:
            return self._sources.by_name(name)
        # The operator named this folder at start, so it is trusted.
        if load is None or load.is_upload or not self._is_restricted:
            return self._sources.by_operator(path)
        return self._sources.by_caller(path, self._lora_dirs)

    def _take_in(self, finished: Finished[_Read]) -> None:
        """Handle a finished read: reply to its requester, then continue with the entry."""
        entry = finished.key
        assert isinstance(entry, AdapterEntry)
        load = entry.load
        entry.is_reading, entry.load = False, None
        try:
            if finished.error is not None:
                raise finished.error
            assert finished.result is not None
            self._open(entry, finished.result, load)
        except Exception as error:
            self._fail(entry, load, error)
        digest = "" if finished.result is None else finished.result.spec.digest.hex()
        is_good = finished.error is None
        self._read_times.append(
            LoadTime(Tier.STORAGE, Tier.HOST, finished.seconds, is_good, digest)
        )
        while entry.waiting and not entry.is_reading:
            self._carry_out(entry, entry.waiting.popleft())
        if entry.module is None and not entry.is_reading and self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        self._forget_found()

    def _open(self, entry: AdapterEntry, read: _Read, load: LoadLora | PublishLora | None) -> None:
        """Let the scheduler accept requests for the name."""
        spec, before = read.spec, self._registry.loaded.get(entry.name)
        is_pinned = load is not None and load.is_pinned
        folder = str(read.located.folder)
        self._scheduler.load_adapter(entry.name, spec, path=folder, is_pinned=is_pinned)
        is_unchanged = before is not None and before.digest == spec.digest
        if before is not None and not is_unchanged:
            self._forget_combinations(before.digest)
        if self._scheduler.adapters.take_copy(spec.digest):
            self._files.keep(read.weights)
        logger.info("adapter %s: rank %d, %d bytes, %s", entry.name, spec.rank, spec.num_bytes,
                    spec.digest.hex()[:16])  # fmt: skip
        if load is not None:
            path = load.path if isinstance(load, LoadLora) else str(read.located.folder)
            entry.module = LoraModule(entry.name, path)
            self._found.pop(entry.name, None)
            self._replies.append(_loaded(load.op_id, read, is_unchanged))

    def _fail(
        self, entry: AdapterEntry, load: LoadLora | PublishLora | None, error: Exception
    ) -> None:
        """The name keeps its earlier meaning; the next use reads the files again (W10)."""
        kind = _kind_of(error)
        if kind is ErrorKind.ENGINE:
            logger.error("adapter %s could not be read", entry.name, exc_info=error)
        if entry.name in self._found and entry.name not in self._registry.loaded:
            # It may exist, or be another one, when it is next named.
            del self._found[entry.name]
            entry.module = None
        if load is not None:
            self._reply_error(load.op_id, str(error), kind)
            return
        reason = f"adapter {entry.name!r} can't be used: {error}"
        if kind is ErrorKind.NOT_FOUND and entry.module is None:
            reason = _no_such_model(entry.name)
        while entry.waiting and isinstance(wanted := entry.waiting[0], UseLora):
            entry.waiting.popleft()
            self._refuse(wanted, reason, kind)

    def _forget_found(self) -> None:
        """Forget the oldest names found in --lora-source if there are too many; they can be found
        again."""
        for name in list(self._found)[: max(0, len(self._found) - MAX_FOUND_NAMES)]:
            entry = self._entries[name]
            if not entry.is_reading and not entry.waiting:
                self._scheduler.unload_adapter(name)
                del self._found[name], self._entries[name]

    def _unload(self, entry: AdapterEntry, message: UnloadLora) -> None:
        entry.module = None
        self._found.pop(entry.name, None)
        reply = LoraReply(message.op_id)
        if entry.name in self._registry.loaded:
            num_free = self._scheduler.stats().num_free_pages
            unloaded = self._scheduler.unload_adapter(entry.name)
            self._forget_combinations(unloaded.version.digest)
            reply = LoraReply(
                message.op_id,
                path=unloaded.version.path,
                digest=unloaded.version.digest.hex(),
                rank=unloaded.version.spec.rank,
                num_bytes=unloaded.version.spec.num_bytes if unloaded.freed else 0,
                num_pages=self._scheduler.stats().num_free_pages - num_free,
                num_requests=unloaded.num_holds,
            )
        self._replies.append(reply)
        if not entry.waiting:
            del self._entries[entry.name]

    def _refuse_unknown(self, message: AdapterMessage) -> None:
        if isinstance(message, UseLora):
            self._refuse(message, _no_such_model(message.name), ErrorKind.NOT_FOUND)
        elif isinstance(message, UnloadLora):
            reason = self._registry.not_loaded(message.name)
            self._reply_error(message.op_id, reason, ErrorKind.NOT_FOUND)
        else:
            reason = self._name_fault(message.name) or "the name can't be used"
            self._reply_error(message.op_id, reason, ErrorKind.REQUEST)

    def _refuse(self, wanted: UseLora, reason: str, kind: ErrorKind) -> None:
        number, notice = wanted.request_id, Notice(error_kind=kind)
        output = Output(number, [], FinishReason.ERROR, 0, error=reason, notice=notice)
        self._outcomes.append((number, output))

    def _reply_error(self, op_id: int, reason: str, kind: ErrorKind) -> None:
        self._replies.append(LoraReply(op_id, error=reason, error_kind=kind))


def _loaded(op_id: int, read: _Read, is_unchanged: bool) -> LoraReply:
    spec = read.spec
    return LoraReply(
        op_id,
        path=read.located.shown,
        digest=spec.digest.hex(),
        rank=spec.rank,
        num_bytes=spec.num_bytes,
        modules=tuple(dict.fromkeys(pair.target.rpartition(".")[2] for pair in spec.pairs)),
        is_unchanged=is_unchanged,
    )


def _kind_of(error: Exception) -> ErrorKind:
    match error:
        case NotFoundError():
            return ErrorKind.NOT_FOUND
        case UnavailableError():
            return ErrorKind.UNAVAILABLE
        case ManyrootsError():
            return ErrorKind.REQUEST
    return ErrorKind.ENGINE


def _no_such_model(name: str) -> str:
    return f"model {name!r} does not exist; GET /v1/models lists those that do."
