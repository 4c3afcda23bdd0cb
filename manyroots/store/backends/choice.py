"""Which backend an address means."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from manyroots.config import TierSettings
from manyroots.errors import ConfigError
from manyroots.store.backends.backend import Backend
from manyroots.store.backends.files import Files


def open_backend(settings: TierSettings) -> Backend | None:
    """The storage that settings name; None if they name none."""
    url = settings.storage_url
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme == "file":
        size = settings.kv_storage_size
        return Files(Path(unquote(parts.path)), None if size is None else int(size * 2**30))
    if parts.scheme in ("redis", "rediss"):
        # Here, because nothing else needs its package.
        from manyroots.store.backends.redis import Redis

        return Redis(url, ttl_s=settings.kv_storage_ttl_s, timeout_s=settings.kv_storage_timeout_s)
    raise ConfigError(
        f"--kv-storage is {url!r}; it must begin with file://, redis:// or rediss://."
    )
