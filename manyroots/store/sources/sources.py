"""Where adapters come from: folders, the hub, object stores and HTTPS.

Takes a path, an address, or a name that is looked up below the prefixes of --lora-source; gives a
folder on this machine. Blocks while it fetches: it runs on separate threads, never in a step or an
event loop.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from manyroots.config import LoraSettings
from manyroots.errors import AdapterError, NotFoundError
from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE, check_folder
from manyroots.lora.files.memory import MemoryAdapter
from manyroots.store.sources.address import (
    Address,
    is_address,
    is_allowed,
    looks_like_hub_id,
    parse_address,
)
from manyroots.store.sources.disk_cache import DiskCache, file_sha256
from manyroots.store.sources.http_ranges import MayFollow, RemoteFile
from manyroots.store.sources.hub import fetch_from_hub
from manyroots.store.sources.memory_copies import MemoryCopies
from manyroots.store.sources.signing import SignedUrls

GIB = 1 << 30
MAX_CONFIG_BYTES = 1 << 20
UNKNOWN_S = 5.0
"""How long a name that no source has is not looked up again."""
MAX_UNKNOWN = 10_000


@dataclass(frozen=True, slots=True)
class Located:
    """An adapter's folder on this machine."""

    folder: Path | str
    """A string stands for several folders (`lora/files/combination.py`)."""
    allowed_dirs: tuple[Path, ...] | None
    """Folders that its files must be in after links are resolved; None: anywhere."""
    shown: str
    """The name in messages to the caller."""


class AdapterSources:
    """One for each process that reads adapters."""

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        given = settings.lora_source
        self._prefixes = [parse_address(item) for item in given if is_address(item)]
        self._roots = [str(Path(item).expanduser()) for item in given if not is_address(item)]
        self._by_name: list[Address | str] = [
            parse_address(item) if is_address(item) else str(Path(item).expanduser())
            for item in given
        ]
        self._max_bytes = int(settings.lora_max_fetch_size * GIB)
        self._signed = SignedUrls()
        self._cache = DiskCache(settings.cache_folder, int(settings.lora_cache_size * GIB))
        self._lock = threading.Lock()
        self._busy: dict[str, tuple[threading.Lock, int]] = {}
        """A lock for each address being fetched, and its number of users."""
        self._kept = MemoryCopies(settings.cache_folder / "published")
        self._unknown: OrderedDict[str, float] = OrderedDict()
        """Names that no source has, and until when they are not looked up again."""

    @property
    def finds_names(self) -> bool:
        """Whether names that were not registered may be found below a prefix."""
        return bool(self._by_name)

    def by_name(self, name: str) -> Located:
        """Look a name up in each source, in order; NotFoundError if none has it."""
        now = time.monotonic()
        with self._lock:
            if self._unknown.get(name, 0.0) > now:
                raise NotFoundError(f"no source has an adapter {name!r}.", field="model")
        for source in self._by_name:
            with contextlib.suppress(NotFoundError):
                if isinstance(source, Address):
                    return self._fetched(source.below(name))
                folder = Path(source, name)
                if (folder / CONFIG_FILE).is_file():
                    allowed = (Path(source),)
                    return Located(check_folder(folder, allowed), allowed, str(folder))
        with self._lock:
            self._unknown[name] = now + UNKNOWN_S
            while len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)
        raise NotFoundError(f"no source has an adapter {name!r}.", field="model")

    def by_operator(self, path: str) -> Located:
        """Locate a path that the operator gave, at start or in Python: any folder and any
        address."""
        if is_address(path):
            return self._fetched(parse_address(path))
        if not Path(path).expanduser().is_dir() and looks_like_hub_id(path):
            return self._fetched(parse_address(f"hf://{path}"))
        folder = check_folder(path, None)
        return Located(folder, None, str(folder))

    def by_caller(self, path: str, lora_dirs: Sequence[str]) -> Located:
        """Locate a path that a caller gave at run time: below --lora-dirs or --lora-source."""
        if is_address(path):
            address = parse_address(path)
            if not is_allowed(address, self._prefixes):
                raise AdapterError(
                    f"{str(address)!r} is below none of --lora-source, so it is not fetched; name "
                    "one that is, or start the server with its prefix.",
                    field="lora_path",
                )
            return self._fetched(address)
        dirs = [*lora_dirs, *self._roots]
        if not dirs:
            raise AdapterError(
                f"{path[:200]!r} is a folder, and no --lora-dirs allows any; give an address below "
                "--lora-source.",
                field="lora_path",
            )
        allowed = tuple(Path(item) for item in dirs)
        refusal: AdapterError | None = None
        for candidate in [path] if path[:1] in ("", "/", "~") else [f"{d}/{path}" for d in allowed]:
            try:
                folder = check_folder(candidate, allowed)
                return Located(folder, allowed, str(folder))
            except AdapterError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def keep(self, name: str, adapter: MemoryAdapter) -> Located:
        """Start to write an adapter in memory to a folder, from which it can be read again."""
        return Located(self._kept.keep(name, adapter), None, "(memory)")

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[Path]:
        """Read a located folder, fetched again if the disk cache has evicted it. An adapter that
        cannot be served is removed from the cache."""
        self._kept.wait(folder)
        if not self._cache.holds(folder):
            yield folder
            return
        if not folder.is_dir() and (source := self._cache.source_of(folder)) is not None:
            folder = Path(self._fetched(parse_address(source)).folder)
        with self._cache.reading(folder):
            try:
                yield folder
            except AdapterError:
                self._cache.discard(folder)
                raise

    def _fetched(self, address: Address) -> Located:
        shown, timeout_s = str(address), self._settings.lora_fetch_timeout_s
        if address.scheme == "hf":
            folder = fetch_from_hub(address, max_bytes=self._max_bytes, timeout_s=timeout_s)
            if address.sha256 is not None:
                _check_pin(folder / WEIGHTS_FILE, address)
            return Located(folder, None, shown)
        with self._alone(shown):
            return Located(self._fetch(address), (self._cache.folder,), shown)

    def _fetch(self, address: Address) -> Path:
        deadline = time.monotonic() + self._settings.lora_fetch_timeout_s
        config = self._remote(address, CONFIG_FILE, MAX_CONFIG_BYTES, deadline)
        weights = self._remote(address, WEIGHTS_FILE, self._max_bytes, deadline)
        config_state, weights_state = config.look(), weights.look()
        plain = replace(address, sha256=None)
        states = f"{config_state} {weights_state} {address.sha256}"
        is_told = config_state.validator and weights_state.validator
        found = self._cache.find(str(plain), states) if is_told else None
        if found is not None:
            return found

        def fill(folder: Path) -> None:
            (folder / CONFIG_FILE).write_bytes(config.read(config_state))
            with (folder / WEIGHTS_FILE).open("xb") as file:
                weights.download(weights_state, file.fileno())
            if address.sha256 is not None:
                _check_pin(folder / WEIGHTS_FILE, address)
            # The two files belong together: neither may have been replaced meanwhile.
            for remote, state in ((config, config_state), (weights, weights_state)):
                if remote.look() != state:
                    raise remote.changed()

        return self._cache.add(str(plain), states, fill)

    def _remote(self, address: Address, file: str, max_bytes: int, deadline: float) -> RemoteFile:
        if address.scheme in ("s3", "gs"):
            make_url = partial(self._signed.url, address, file)
            may_follow: MayFollow = _never
        else:
            make_url = partial(_plain_url, address, file)
            may_follow = self._may_follow(address)
        return RemoteFile(
            f"{address}/{file}", make_url, may_follow, max_bytes=max_bytes, deadline=deadline
        )

    def _may_follow(self, address: Address) -> MayFollow:
        """Redirects must stay below the same prefix, or on the host that the operator named."""
        prefixes = [item for item in self._prefixes if address.is_below(item)]
        allowed = prefixes or [replace(address, parts=())]

        def may_follow(url: str) -> bool:
            try:
                return is_allowed(parse_address(url.partition("?")[0]), allowed)
            except AdapterError:
                return False

        return may_follow

    @contextlib.contextmanager
    def _alone(self, address: str) -> Iterator[None]:
        """One fetch of an address at a time."""
        with self._lock:
            lock, count = self._busy.get(address, (threading.Lock(), 0))
            self._busy[address] = lock, count + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, count = self._busy[address]
                if count == 1:
                    del self._busy[address]
                else:
                    self._busy[address] = lock, count - 1


def _plain_url(address: Address, file: str) -> str:
    return f"{address}/{file}".replace(" ", "%20")


def _never(url: str) -> bool:
    return False


def _check_pin(path: Path, address: Address) -> None:
    found = file_sha256(path)
    if found != address.sha256:
        raise AdapterError(
            f"the weights at {address} have the SHA-256 {found}, and {address.sha256} was asked "
            "for; they are not used. Check their origin.",
            field="lora_path",
        )
