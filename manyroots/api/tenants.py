"""Keys with rights and limits of their own: which adapters a key may name, and how much it may use.

Takes the keys file; gives the `Tenant` of a request, which the middleware finds by its key. A name
that a tenant may not use is to it as one that does not exist. Limits are kept by reservation: what
a request may come to use is set aside when it is admitted, and what it did not use is given back,
so that no number of clients can go over.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from manyroots.adapter_names import MAX_NAME_CHARACTERS
from manyroots.errors import ConfigError, OverloadedError, RequestError
from manyroots.messages import Submit

MAX_KEYS = 1000
"""Each is a label of the metrics."""
_MINUTE_S = 60.0


class KeySpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One key of the file."""

    name: str
    """What logs and metrics call it; never the key itself."""
    key: str | None = None
    sha256: str | None = None
    """Of the key, in hexadecimal, for a file that is no secret."""
    adapters: list[str] = []
    """Names, or beginnings of names that end with `*`."""
    base_model: bool = True
    max_running: int | None = None
    """Sequences alive at once."""
    tokens_per_minute: int | None = None
    """Of prompts and answers."""
    memory_share: float | None = None
    """Of the cache's pages: what the key's requests may come to hold."""


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeySpec]


class KeyCounts(Protocol):
    """What a key uses now. Entered while it is read and changed, because gateways may share it."""

    num_running: int
    """Sequences alive, of all gateways."""
    num_held_tokens: int
    """What its live requests may come to hold in the cache, of all gateways."""
    num_spent: float
    """Tokens of its minute that are used up, at `filled_at`."""
    filled_at: float

    def __enter__(self) -> object: ...

    def __exit__(self, *why: object) -> None: ...


class LocalCounts:
    """Those of a server with one gateway."""

    def __init__(self, number: int) -> None:
        self.num_running = 0
        self.num_held_tokens = 0
        self.num_spent = 0.0
        self.filled_at = 0.0

    def __enter__(self) -> None:
        """Nothing else can change it."""

    def __exit__(self, *why: object) -> None:
        """Nothing waits for it."""


class Tenant:
    """One key's rights and what it uses now. Belongs to the event loop."""

    def __init__(
        self,
        spec: KeySpec,
        clock: Callable[[], float] = time.monotonic,
        counts: KeyCounts | None = None,
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self._counts: KeyCounts = LocalCounts(0) if counts is None else counts
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._exact = frozenset(item for item in spec.adapters if not item.endswith("*"))
        self._begins = tuple(item[:-1] for item in spec.adapters if item.endswith("*"))

    def may_use(self, name: str) -> bool:
        return name in self._exact or name.startswith(self._begins)

    @property
    def num_running(self) -> int:
        return self._counts.num_running

    @property
    def num_held_tokens(self) -> int:
        """What its live requests may come to hold in the cache."""
        return self._counts.num_held_tokens

    def begin(self, num_sequences: int) -> TenantLease:
        """OverloadedError if as many as it may have are alive."""
        limit = self.spec.max_running
        if limit is not None and num_sequences > limit:
            raise RequestError(
                f"The request has {num_sequences} sequences, and this key may have {limit} at "
                "once; ask for fewer.",
                field="n",
            )
        with self._counts:
            num_running = self._counts.num_running
            if limit is not None and num_running + num_sequences > limit:
                raise self._over(
                    "running",
                    f"{num_running} sequences are running, this request has {num_sequences}, and "
                    f"{limit} are allowed",
                    1.0,
                )
            self._counts.num_running = num_running + num_sequences
        return TenantLease(self, num_sequences)

    def end(self, num_sequences: int) -> None:
        """As many sequences are over."""
        with self._counts:
            self._counts.num_running -= num_sequences

    def reserve(self, num_tokens: int, capacity: int) -> None:
        """Set aside what a request may use; `capacity`: tokens that the cache has room for."""
        share, rate = self.spec.memory_share, self.spec.tokens_per_minute
        room = None if share is None else int(share * capacity)
        for most, what in ((room, "memory_share"), (rate, "tokens_per_minute")):
            if most is not None and num_tokens > most:
                raise RequestError(
                    f"The request may come to {num_tokens} tokens, and this key's {what} allows "
                    f"{most}; send a shorter prompt or a smaller max_tokens.",
                    field="max_tokens",
                )
        with self._counts:
            num_held = self._counts.num_held_tokens
            if room is not None and num_held + num_tokens > room:
                raise self._over(
                    "memory",
                    f"its requests may hold {num_held} tokens, this one {num_tokens} more, "
                    f"and {room} are its share of memory",
                    1.0,
                )
            if rate is not None:
                self._spend(num_tokens, rate)
            self._counts.num_held_tokens = num_held + num_tokens

    def _spend(self, num_tokens: int, rate: int) -> None:
        left = rate - self._refill(rate)
        if num_tokens > left:
            wait_s = (num_tokens - left) * _MINUTE_S / rate
            raise self._over(
                "tokens",
                f"this request may use {num_tokens} tokens, {int(left)} of "
                f"{rate} per minute are left",
                wait_s,
            )
        self._counts.num_spent += num_tokens

    def give_back(self, num_reserved: int, num_used: int) -> None:
        """A request is over."""
        with self._counts:
            self._counts.num_held_tokens -= num_reserved
            rate = self.spec.tokens_per_minute
            if rate is not None:
                spent = self._refill(rate) - num_reserved + num_used
                self._counts.num_spent = max(0.0, spent)

    def _refill(self, rate: int) -> float:
        """What of the minute's tokens is used up now."""
        counts, now = self._counts, self._clock()
        spent = counts.num_spent - (now - counts.filled_at) * rate / _MINUTE_S
        counts.num_spent, counts.filled_at = max(0.0, spent), now
        return counts.num_spent

    def _over(self, reason: str, why: str, wait_s: float) -> OverloadedError:
        self.refused[reason] += 1
        return OverloadedError(
            f"This key is at its limit: {why}. Try again later.",
            retry_after_s=max(1, math.ceil(wait_s)),
        )


class TenantLease:
    """One request's share of its key's limits; given back exactly once."""

    def __init__(self, tenant: Tenant, num_sequences: int) -> None:
        self.tenant = tenant
        self._num_sequences = num_sequences
        self._num_reserved = 0
        self.num_used = 0
        """Tokens of its prompts and answers, as far as it got."""
        self._is_open = True

    def reserve(self, submits: Sequence[Submit], max_model_len: int, capacity: int) -> None:
        total = sum(len(s.prompt) + _most_new(s, max_model_len) for s in submits)
        self.tenant.reserve(total, capacity)
        self._num_reserved = total

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            self.tenant.end(self._num_sequences)
            self.tenant.give_back(self._num_reserved, self.num_used)


def _most_new(submit: Submit, max_model_len: int) -> int:
    most = submit.sampling.max_tokens or submit.max_tokens
    return max_model_len - len(submit.prompt) if most is None else most


@dataclass(frozen=True, slots=True)
class Tenants:
    """All keys of a file."""

    by_hash: dict[bytes, Tenant]

    def find(self, key: bytes | None) -> Tenant | None:
        """By the key's hash: how long it takes says nothing of other keys."""
        return None if key is None else self.by_hash.get(hashlib.sha256(key).digest())

    def all(self) -> list[Tenant]:
        return list(self.by_hash.values())


_CURRENT: ContextVar[Tenant | None] = ContextVar("tenant", default=None)


def current_tenant() -> Tenant | None:
    """Whose request this task serves; None where no key limits it."""
    return _CURRENT.get()


def set_tenant(tenant: Tenant | None) -> None:
    _CURRENT.set(tenant)


def load_tenants(
    path: str,
    clock: Callable[[], float] = time.monotonic,
    make_counts: Callable[[int], KeyCounts] = LocalCounts,
) -> Tenants:
    """ConfigError says what is wrong with a keys file. `make_counts`: those of a key, by its place
    in the file."""
    try:
        raw: Any = json.loads(Path(path).expanduser().read_text())
        specs = msgspec.convert(raw, _KeysFile).keys
    except OSError as error:
        raise ConfigError(f"--keys-file {path} can't be read: {error.strerror}.") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"--keys-file {path} is not usable: {error}. Write "
            '{"keys": [{"name": "acme", "key": "...", "adapters": ["acme/*"]}]}.'
        ) from error
    if not 1 <= len(specs) <= MAX_KEYS:
        raise ConfigError(f"--keys-file {path} has {len(specs)} keys; give from 1 to {MAX_KEYS}.")
    by_hash: dict[bytes, Tenant] = {}
    names: set[str] = set()
    for spec in specs:
        fault = _fault(spec)
        hashed = _hash_of(spec)
        if fault is None and spec.name in names:
            fault = "there is another of this name"
        if fault is None and hashed in by_hash:
            fault = "another name has the same key"
        if fault is not None:
            raise ConfigError(f"--keys-file {path}, key {spec.name!r}: {fault}.")
        names.add(spec.name)
        by_hash[hashed] = Tenant(spec, clock, make_counts(len(by_hash)))
    return Tenants(by_hash)


def _hash_of(spec: KeySpec) -> bytes:
    if spec.key is not None:
        return hashlib.sha256(spec.key.encode()).digest()
    try:
        return bytes.fromhex(spec.sha256 or "")
    except ValueError:
        return b""


def _fault(spec: KeySpec) -> str | None:
    if not spec.name.isprintable() or not 1 <= len(spec.name) <= MAX_NAME_CHARACTERS:
        return f"a name has from 1 to {MAX_NAME_CHARACTERS} printable characters"
    if (spec.key is None) == (spec.sha256 is None) or spec.key == "":
        return "give key, or sha256 of it"
    if len(_hash_of(spec)) != hashlib.sha256().digest_size:
        return "sha256 has 64 hexadecimal digits"
    if any("*" in item[:-1] or not item for item in spec.adapters):
        return "adapters are names, or beginnings of names that end with one *"
    for name in ("max_running", "tokens_per_minute"):
        value = getattr(spec, name)
        if value is not None and value < 1:
            return f"{name} is {value}; it must be at least 1"
    if spec.memory_share is not None and not 0 < spec.memory_share <= 1:
        return f"memory_share is {spec.memory_share}; it must be above 0, at most 1"
    return None
