"""What the server under test can do, as far as it says so itself.

Takes a client and what the user said; gives the parties that requests can be sent as, and for each
feature that is missing the reason that rows show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyroots.conformance.client import ConformanceClient, Party
from manyroots.errors import ConfigError

_VERSION_PATHS = ("/version", "/props", "/get_server_info")


@dataclass(frozen=True, slots=True)
class Features:
    """Of one server."""

    base: Party
    adapters: tuple[Party, ...]
    """Those that are served without the kit's doing."""
    max_model_len: int | None
    no_salts: str | None
    """Why salts can't be judged; None: they can."""
    no_loads: str | None
    """The same of loading adapters."""
    can_skip_cache: bool
    """Whether a request may say that it wants nothing of the cache (llama.cpp's `cache_prompt`)."""
    version: str
    """What the server says of itself."""


def look_at(
    client: ConformanceClient,
    key: str | None,
    *,
    adapters: Mapping[str, Mapping[str, Any]],
    folders: tuple[str, ...],
    salts: bool | None,
) -> Features:
    """`adapters`: names to use, each with further fields of the body; empty for all that the
    server lists. `salts`: whether the server knows `cache_salt`; None asks its OpenAPI document."""
    models = client.models(key)
    if not models:
        raise ConfigError("the server lists no model at /v1/models; serve one.")
    bases = [model for model in models if not model.get("parent")] or models
    base = Party("base", str(bases[0]["id"]), key)
    length = bases[0].get("max_model_len")
    document = client.optional("/openapi.json")
    text = "" if document is None else json.dumps(document)
    chosen = _named(adapters, base) or _listed(client, models, base)
    return Features(
        base=base,
        adapters=tuple(chosen),
        max_model_len=length if isinstance(length, int) else _context_of(client, key),
        no_salts=_no_salts(document is not None, "cache_salt" in text, salts),
        no_loads=_no_loads(folders),
        can_skip_cache=_is_llama_cpp(client, key),
        version=_version(client, key),
    )


def _named(adapters: Mapping[str, Mapping[str, Any]], base: Party) -> list[Party]:
    """A name without fields is a model; one with fields is those fields beside the base model."""
    return [
        Party(name, base.model if fields else name, base.key, fields)
        for name, fields in adapters.items()
    ]


def _listed(client: ConformanceClient, models: list[dict[str, Any]], base: Party) -> list[Party]:
    named = [str(model["id"]) for model in models if model.get("parent")]
    if named:
        return [Party(name, name, base.key) for name in named]
    listed = client.optional("/lora-adapters", base.key)  # llama.cpp: by number, in the body
    if not isinstance(listed, list):
        return []
    ids = [entry["id"] for entry in listed if isinstance(entry, dict) and "id" in entry]
    return [
        Party(
            f"adapter {chosen}",
            base.model,
            base.key,
            {"lora": [{"id": each, "scale": float(each == chosen)} for each in ids]},
        )
        for chosen in ids
    ]


def _no_salts(has_document: bool, is_declared: bool, said: bool | None) -> str | None:
    if said is True or (said is None and is_declared):
        return None
    if said is False:
        return "--salts no"
    if has_document:
        return "its OpenAPI document has no cache_salt"
    return "it has no /openapi.json that declares cache_salt; --salts yes judges it all the same"


def _no_loads(folders: tuple[str, ...]) -> str | None:
    if len(folders) < 2:
        return "give two adapter folders that the server can load with --folders"
    return None


def _is_llama_cpp(client: ConformanceClient, key: str | None) -> bool:
    props = client.optional("/props", key)
    return isinstance(props, dict) and "default_generation_settings" in props


def _context_of(client: ConformanceClient, key: str | None) -> int | None:
    """llama.cpp's context of one slot."""
    props = client.optional("/props", key)
    settings = props.get("default_generation_settings") if isinstance(props, dict) else None
    length = settings.get("n_ctx") if isinstance(settings, dict) else None
    return length if isinstance(length, int) else None


def _version(client: ConformanceClient, key: str | None) -> str:
    for path in _VERSION_PATHS:
        told = client.optional(path, key)
        if isinstance(told, dict):
            found = told.get("version") or told.get("build_info")
            if isinstance(found, str):
                return found
    return "unknown"
