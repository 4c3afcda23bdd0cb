"""Which adapters are loaded under which names, and which old versions requests still hold.

In: names, content digests, and the beginning and end of each request. Out: versions, holds, and
the contents that are no longer needed. A *version* is one loading of a name; its *content* is the
digest of its weights and config, which versions may share. A version that is unloaded or replaced
takes no new requests and is *draining* until the last hold on it is released.

Knows nothing of where weights are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from manyroots.adapter_names import split_revision
from manyroots.errors import NotFoundError
from manyroots.ids import REVISION_DIGITS, AdapterDigest, AdapterName, AdapterSlot
from manyroots.lora.spec import AdapterSpec

NAMES_IN_ERRORS = 5
"""The most names that an error lists."""


def revision_of(digest: AdapterDigest) -> str:
    """Twelve digits tell the revisions of one name apart; the registry compares whole digests."""
    return digest.hex()[:REVISION_DIGITS]


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One loading of a name."""

    name: AdapterName
    serial: int
    """Counts loadings, over all names."""
    spec: AdapterSpec
    """What was in its files."""
    path: str
    """Where those are, as the execute half reads them."""
    is_pinned: bool = False
    """Its slot on the device is never given to another."""

    @property
    def digest(self) -> AdapterDigest:
        return self.spec.digest

    @property
    def revision(self) -> str:
        """What answers call its content, and requests that want no other."""
        return revision_of(self.digest)


class Hold:
    """A request's right to one version, from its submission to its end; released exactly once."""

    __slots__ = ("is_open", "slot", "version")

    def __init__(self, version: AdapterVersion) -> None:
        self.version = version
        self.is_open = True
        self.slot: AdapterSlot | None = None
        """Where its weights are while the request runs."""

    @property
    def digest(self) -> AdapterDigest:
        return self.version.digest


@dataclass(frozen=True, slots=True)
class Registered:
    """A name means `version` from now on."""

    version: AdapterVersion
    freed: tuple[AdapterDigest, ...]
    """What is no longer needed: the content that was replaced, unless it is held or shared."""


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A name means nothing from now on."""

    version: AdapterVersion
    num_holds: int
    """Requests that still hold it; above 0, the last one's release frees the content."""
    freed: tuple[AdapterDigest, ...]


@dataclass(slots=True)
class Content:
    """Weights that at least one version needs."""

    versions: dict[int, AdapterVersion] = field(default_factory=dict)
    """Loaded and draining, by serial number."""
    num_loaded: int = 0


class Registry:
    """Names, versions and holds. Read by anyone; changed only through `Residency`."""

    def __init__(self) -> None:
        self.loaded: dict[AdapterName, AdapterVersion] = {}
        """What each name means now, in the order of loading."""
        self.draining: dict[int, AdapterVersion] = {}
        """By serial number."""
        self.contents: dict[AdapterDigest, Content] = {}
        self.open_holds: set[Hold] = set()
        self.num_holds: dict[int, int] = {}
        """Open holds by serial number, of every version that is loaded or draining."""
        self.pinned: Counter[AdapterDigest] = Counter()
        """Contents that stay on the device, each with how many names want it there."""
        self._next_serial = 1

    def register(
        self, name: AdapterName, spec: AdapterSpec, *, path: str, is_pinned: bool = False
    ) -> Registered:
        """Load a name, or give it new content. The same content again is the same version; only
        where its files are, and whether it is pinned, may change."""
        old = self.loaded.get(name)
        if old is not None and old.digest == spec.digest:
            same = replace(old, path=path, is_pinned=is_pinned)
            self._unpin(old)
            self._pin(same)
            self.loaded[name] = self.contents[spec.digest].versions[old.serial] = same
            return Registered(same, ())
        version = AdapterVersion(name, self._next_serial, spec, path, is_pinned)
        self._next_serial += 1
        self.loaded.pop(name, None)
        if old is not None:
            self._unpin(old)
        self._pin(version)
        self.loaded[name] = version
        self.num_holds[version.serial] = 0
        content = self.contents.setdefault(spec.digest, Content())
        content.versions[version.serial] = version
        content.num_loaded += 1
        return Registered(version, self._retire(old) if old is not None else ())

    def unload(self, name: AdapterName) -> Unloaded:
        """Take no new requests for a name. Requests that hold it go on."""
        version = self.loaded.pop(name, None)
        if version is None:
            raise NotFoundError(self.not_loaded(name), field="lora_name")
        self._unpin(version)
        return Unloaded(version, self.num_holds[version.serial], self._retire(version))

    def not_loaded(self, name: AdapterName) -> str:
        """The error for an unload of an unknown name. Only operators unload, so it may list
        names."""
        names = sorted(self.loaded)[:NAMES_IN_ERRORS]
        if not names:
            return f"adapter {name!r} is not loaded; none is."
        rest = len(self.loaded) - len(names)
        more = f" and {rest} more" if rest else ""
        return f"adapter {name!r} is not loaded; loaded: {', '.join(map(repr, names))}{more}."

    def acquire(self, asked: AdapterName) -> Hold:
        """A new request's hold on what a name means now, or on the revision after its `@`."""
        version = self.find(asked)
        if version is None:
            raise NotFoundError(
                f"model {asked!r} does not exist; GET /v1/models lists those that do, and an "
                "adapter must be loaded before it is used.",
                field="model",
            )
        hold = Hold(version)
        self.open_holds.add(hold)
        self.num_holds[version.serial] += 1
        return hold

    def find(self, asked: AdapterName) -> AdapterVersion | None:
        """What a name means now; or the revision after its `@`, if that is alive: loaded, or held
        by other requests."""
        name, revision = split_revision(asked)
        version = self.loaded.get(AdapterName(name))
        if revision is None or (version is not None and version.revision == revision):
            return version
        older = (v for v in self.draining.values() if v.name == name and v.revision == revision)
        return next(older, None)

    def release(self, hold: Hold) -> tuple[AdapterDigest, ...]:
        """The request is over. Gives what is no longer needed."""
        version = hold.version
        if not hold.is_open:
            raise RuntimeError(f"a hold on adapter {version.name!r} was released twice")
        hold.is_open = False
        self.open_holds.remove(hold)
        self.num_holds[version.serial] -= 1
        if version.serial not in self.draining or self.num_holds[version.serial] > 0:
            return ()
        del self.draining[version.serial]
        return self._forget(version)

    def is_draining(self, digest: AdapterDigest) -> bool:
        """Whether only old requests need this content: no name leads to it any more."""
        content = self.contents.get(digest)
        return content is not None and content.num_loaded == 0

    def _pin(self, version: AdapterVersion) -> None:
        if version.is_pinned:
            self.pinned[version.digest] += 1

    def _unpin(self, version: AdapterVersion) -> None:
        """A name does not want it any more."""
        if version.is_pinned:
            self.pinned[version.digest] -= 1
            if not self.pinned[version.digest]:
                del self.pinned[version.digest]

    def source(self, digest: AdapterDigest) -> AdapterVersion:
        """The version whose files to read: of those with this content, the one loaded last.

        Files of a version that was unloaded may have been replaced since.
        """
        versions = self.contents[digest].versions
        is_loaded = [v for v in versions.values() if self.loaded.get(v.name) is v]
        return (is_loaded or list(versions.values()))[-1]

    def name_of(self, digest: AdapterDigest) -> AdapterName | None:
        """What content is called, by the name that it was loaded under last; None if it is gone."""
        return self.source(digest).name if digest in self.contents else None

    def _retire(self, version: AdapterVersion) -> tuple[AdapterDigest, ...]:
        self.contents[version.digest].num_loaded -= 1
        if self.num_holds[version.serial] > 0:
            self.draining[version.serial] = version
            return ()
        return self._forget(version)

    def _forget(self, version: AdapterVersion) -> tuple[AdapterDigest, ...]:
        del self.num_holds[version.serial]
        content = self.contents[version.digest]
        del content.versions[version.serial]
        if content.versions:
            return ()
        del self.contents[version.digest]
        return (version.digest,)
