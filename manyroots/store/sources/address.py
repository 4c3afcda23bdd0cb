"""Addresses of adapters that are not folders, and the prefixes below which they may be fetched.

Takes text from a user or a request; gives an `Address`, or raises the reason that it is not one.
Uses no network and no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from manyroots.errors import AdapterError

SCHEMES = ("s3", "gs", "https", "http", "hf")
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_PART = re.compile(r"[A-Za-z0-9._=+@-]+( [A-Za-z0-9._=+@-]+)*")
"""A part of a path. A percent sign could hide a slash or dots from the check of the prefix."""
_HUB_ID = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
_PIN = re.compile(r"sha256=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an adapter's two files are."""

    scheme: str
    host: str
    """The bucket, the host with its port, or the owner of a hub's repository."""
    parts: tuple[str, ...]
    sha256: str | None = None
    """Required hash of the weights file; None accepts any."""

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join((self.host, *self.parts))}"

    def is_below(self, prefix: Address) -> bool:
        """Compares whole parts: `s3://a/b` is not above `s3://a/bc`."""
        return (self.scheme, self.host) == (prefix.scheme, prefix.host) and (
            self.parts[: len(prefix.parts)] == prefix.parts
        )

    def below(self, name: str) -> Address:
        """The address of an adapter's name under this prefix."""
        return replace(self, parts=(*self.parts, *name.split("/")))


def is_address(path: str) -> bool:
    """Whether a path is a network address rather than a folder."""
    return path.partition("://")[0].lower() in SCHEMES and "://" in path


def looks_like_hub_id(path: str) -> bool:
    """Whether a path that is not a folder here could be an id of the hub."""
    return _HUB_ID.fullmatch(path) is not None and ".." not in path


def parse_address(text: str) -> Address:
    """Raises AdapterError with the reason."""
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise _bad(text, f"begins with none of {', '.join(f'{item}://' for item in SCHEMES)}")
    rest, _, fragment = rest.partition("#")
    pin = _PIN.fullmatch(fragment) if fragment else None
    if fragment and pin is None:
        raise _bad(text, "has something after '#' that is not sha256= with 64 hex digits")
    host, *parts = rest.rstrip("/").split("/")
    if not host or not all(_PART.fullmatch(part) and set(part) != {"."} for part in parts):
        raise _bad(text, "has an empty part, dots, or characters other than letters and ._=+@-")
    if any(character in host for character in "?@\\% "):
        raise _bad(text, "has a host or bucket with characters that none has")
    if scheme in ("https", "http"):
        host = host.lower()
        if scheme == "http" and urlsplit(f"//{host}").netloc.rsplit(":", 1)[0] not in LOOPBACK:
            raise _bad(text, "is http://, which anyone on the way could change; use https://")
    return Address(scheme, host, tuple(parts), None if pin is None else pin[1])


def is_allowed(address: Address, prefixes: Iterable[Address]) -> bool:
    return any(address.is_below(prefix) for prefix in prefixes)


def _bad(text: str, why: str) -> AdapterError:
    return AdapterError(
        f"the adapter address {text[:200]!r} {why}. Write for example s3://bucket/adapters/sql.",
        field="lora_path",
    )
