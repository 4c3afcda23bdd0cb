"""Maps a URL to its backend: one entry point per scheme, ours and those of plug-ins (T14).

An installed package adds a scheme with an entry point of the group `manyroots.kv_storage`. Ours are
listed here in the same form, so that they also work from a source tree. Ours win: a plug-in cannot
replace a built-in scheme.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from manyroots.config import TierSettings
from manyroots.errors import ConfigError
from manyroots.store.backends.backend import Backend, BackendKind, StorageOptions

GROUP = "manyroots.kv_storage"
OWN = {
    "file": "manyroots.store.backends.files:Files",
    "redis": "manyroots.store.backends.redis:Redis",
    "rediss": "manyroots.store.backends.redis:Redis",
    "s3": "manyroots.store.backends.s3:S3",
}


def open_backend(settings: TierSettings) -> Backend | None:
    """The storage that settings name; None if they name none."""
    url = settings.storage_url
    if url is None:
        return None
    kind, options = kind_of(url), options_of(settings)
    kind.check(url, options)
    return kind.open(url, options)


def check_storage(settings: TierSettings) -> None:
    """Raise ConfigError for storage that can't be opened with these settings; connects to
    nothing."""
    url = settings.storage_url
    if url is not None:
        kind_of(url).check(url, options_of(settings))


def options_of(settings: TierSettings) -> StorageOptions:
    size = settings.kv_storage_size
    return StorageOptions(
        max_bytes=None if size is None else int(size * 2**30),
        ttl_s=settings.kv_storage_ttl_s,
        timeout_s=settings.kv_storage_timeout_s,
    )


def kind_of(url: str) -> BackendKind:
    """Imports only the module of the URL's scheme. Errors omit the URL, which may have a
    password."""
    scheme = url.partition("://")[0]
    found = _entry_points()
    if scheme not in found:
        schemes = ", ".join(f"{name}://" for name in sorted(found))
        raise ConfigError(
            f"--kv-storage begins with {scheme!r}; installed kinds of storage are {schemes}. Use "
            f"one of them, or install a package that has {scheme!r} as an entry point of {GROUP}."
        )
    kind: BackendKind = imported(found[scheme], f"--kv-storage begins with {scheme}://")
    missing = [name for name in ("check", "open") if not callable(getattr(kind, name, None))]
    if missing:
        raise ConfigError(
            f"--kv-storage begins with {scheme}://, and {found[scheme].value} has no "
            f"{' and no '.join(missing)}; upgrade the package that provides it."
        )
    return kind


def imported(entry: EntryPoint, asked: str) -> Any:
    """What a plug-in provides; `asked` says which setting needs it."""
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"{asked}, and {entry.value} can't be imported: {type(error).__name__}: {error}. "
            "Repair or upgrade the package that provides it."
        ) from error


def _entry_points() -> dict[str, EntryPoint]:
    """By scheme. If two plug-ins have one scheme, the first by module name is used."""
    plugins = sorted(entry_points(group=GROUP), key=lambda entry: entry.value, reverse=True)
    own = [EntryPoint(scheme, value, GROUP) for scheme, value in OWN.items()]
    return {entry.name: entry for entry in (*plugins, *own)}
