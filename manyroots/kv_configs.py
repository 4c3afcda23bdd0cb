"""What vLLM's users write as JSON about tiers and events, in our own words.

Takes the text of --kv-transfer-config or --kv-events-config; gives what our flags would say, or an
error that names the part that is not served and the flag to use instead. Form of vLLM 0.28.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from manyroots.errors import ConfigError

_TRANSFER = "--kv-transfer-config"
_EVENTS = "--kv-events-config"
_CONNECTORS = {
    "OffloadingConnector": {"cpu_bytes_to_use", "num_cpu_blocks", "spec_name", "eviction_policy"},
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use"},
    "SharedStorageConnector": {"shared_storage_path"},
    "ExampleConnector": {"shared_storage_path"},
}
"""Those that mean tiers of one server, and what may be said to each."""


@dataclass(frozen=True, slots=True)
class TransferChoice:
    """What a --kv-transfer-config asks for."""

    host_bytes: int | None = None
    num_host_pages: int | None = None
    storage: str | None = None


@dataclass(frozen=True, slots=True)
class EventsChoice:
    """Where events are published. Fields are called as vLLM's are."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches that can be asked for again."""
    hwm: int = 100_000
    """Messages that wait for a slow subscriber before it loses some."""
    max_queue_size: int = 100_000
    """Batches that wait to be sent; more are dropped, which subscribers see as a gap."""
    topic: str = ""


def parse_transfer(text: str) -> TransferChoice:
    """What a --kv-transfer-config means here."""
    given = _parsed(_TRANSFER, text)
    connector = given.pop("kv_connector", None)
    if connector not in _CONNECTORS:
        raise ConfigError(
            f"{_TRANSFER} names kv_connector {connector!r}, which is not served; this engine has "
            f"{', '.join(_CONNECTORS)}. Use --kv-offloading-size GB for host memory, and "
            "--kv-storage file:///path or redis://host:port/0 for what lasts or is shared."
        )
    role = given.pop("kv_role", "kv_both")
    if role != "kv_both":
        raise ConfigError(
            f"{_TRANSFER} has kv_role {role!r}; every server here stores and loads: use 'kv_both'."
        )
    extra = given.pop("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ConfigError(f"{_TRANSFER}: kv_connector_extra_config must be an object of JSON.")
    _refuse_unknown(_TRANSFER, given, ())
    _refuse_unknown(f"{_TRANSFER} (extra config of {connector})", extra, _CONNECTORS[connector])
    if extra.get("spec_name", "CPUOffloadingSpec") != "CPUOffloadingSpec":
        raise ConfigError(
            f"{_TRANSFER} has spec_name {extra['spec_name']!r}; only CPUOffloadingSpec is served. "
            "Tiers below host memory are --kv-storage."
        )
    if extra.get("eviction_policy", "lru") != "lru":
        raise ConfigError(
            f"{_TRANSFER} has eviction_policy {extra['eviction_policy']!r}; host memory is evicted "
            "by 'lru' here, shared prefixes last. Leave it out."
        )
    if "shared_storage_path" in _CONNECTORS[connector]:
        path = extra.get("shared_storage_path")
        if not isinstance(path, str) or not path.startswith("/"):
            raise ConfigError(
                f"{_TRANSFER} has shared_storage_path {path!r}; it must be an absolute path."
            )
        return TransferChoice(storage=f"file://{path}")
    host_bytes = _count(_TRANSFER, extra, "cpu_bytes_to_use")
    num_pages = _count(_TRANSFER, extra, "num_cpu_blocks")
    if (host_bytes is None) == (num_pages is None):
        raise ConfigError(
            f"{_TRANSFER} must say how much host memory {connector} may use: give either "
            "cpu_bytes_to_use or num_cpu_blocks."
        )
    return TransferChoice(host_bytes, num_pages)


def parse_events(text: str) -> EventsChoice | None:
    """What a --kv-events-config means here; None if it switches events off."""
    given = _parsed(_EVENTS, text)
    is_on = given.pop("enable_kv_cache_events", False)
    if not isinstance(is_on, bool):
        raise ConfigError(f"{_EVENTS} has enable_kv_cache_events {is_on!r}; use true or false.")
    publisher = given.pop("publisher", None) or ("zmq" if is_on else "null")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"{_EVENTS} has publisher {publisher!r}; choose one of zmq, null.")
    names = [spec.name for spec in fields(EventsChoice)]
    _refuse_unknown(_EVENTS, given, names)
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        _count(_EVENTS, given, name)
    for name in ("endpoint", "replay_endpoint", "topic"):
        if not isinstance(given.get(name, ""), str | None):
            raise ConfigError(f"{_EVENTS} has {name} {given[name]!r}; it must be text.")
    for name in ("endpoint", "replay_endpoint"):
        value = given.get(name)
        if value and not value.startswith(("tcp://", "ipc://", "inproc://")):
            raise ConfigError(
                f"{_EVENTS} has {name} {value!r}; it must begin with tcp://, ipc:// or inproc://."
            )
    if "endpoint" in given and not given["endpoint"]:
        raise ConfigError(f"{_EVENTS} has no endpoint; leave it out for tcp://*:5557.")
    return EventsChoice(**given) if is_on and publisher == "zmq" else None


def _parsed(flag: str, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is no JSON: {error}.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{flag} must be an object of JSON, as {{...}}.")
    return given


def _refuse_unknown(where: str, given: Mapping[str, Any], known: Any) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        served = ", ".join(sorted(known)) or "kv_connector, kv_role, kv_connector_extra_config"
        raise ConfigError(
            f"{where} has {', '.join(unknown)}, which nothing here is called; it may have {served}."
        )


def _count(flag: str, given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ConfigError(f"{flag} has {name} {value!r}; it must be a number of at least 1.")
    return int(value)
