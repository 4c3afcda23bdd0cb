"""docs/reference/http.md: every route with the fields that it takes and gives, from its types."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from manyroots.api.app import endpoints
from manyroots.api.endpoints import EVENTS, Endpoint
from manyroots.api.errors import ErrorBody
from manyroots.api.middleware import OPEN_PATHS
from manyroots.api.page.routes import page_files
from manyroots.api.requests import INSTEAD, SAME_AS_ABSENT, Ignored, Unsupported
from manyroots.server_config import ServerSettings
from tools.docs.markdown import NOTICE, code, table
from tools.docs.sources import Field, class_of

HEAD = f"""\
# HTTP: routes and fields

{NOTICE}
A running server shows the same at `/docs` and `/openapi.json`. [Operating](../operating.md) says
which key a route needs, and [clients](../clients.md) which clients were tested.

## Routes

"""


def routes() -> list[Endpoint]:
    """Those of a server on which everything is switched on."""
    return endpoints(ServerSettings(admin_key="key", enable_lora_endpoints=True))


def _key(endpoint: Endpoint) -> str:
    if endpoint.is_admin:
        return "admin"
    is_file = endpoint.path == "/page/{file}"
    return "none" if is_file or endpoint.path in OPEN_PATHS | page_files().keys() else "API"


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The struct, those in its fields, and those in a union or a list."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from _structs(hint)
    else:
        for inner in typing.get_args(kind):
            yield from _structs(inner)


def _fields(kind: type[msgspec.Struct]) -> dict[str, Field]:
    """By name, those of the bases first; a class overrules its bases."""
    found: dict[str, Field] = {}
    for cls in reversed(kind.__mro__):
        if issubclass(cls, msgspec.Struct) and cls is not msgspec.Struct:
            source = class_of(cls.__module__, cls.__qualname__)
            found |= {field.name: field for field in source.fields}
    return found


def _link(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if kind is Any or typing.get_origin(kind) in (None, dict):
        return "an object"
    inner = " or ".join(_link(item) for item in typing.get_args(kind) if item is not type(None))
    return f"list of {inner}" if typing.get_origin(kind) is list else inner


def _struct(kind: type[msgspec.Struct]) -> str:
    text = class_of(kind.__module__, kind.__qualname__).text
    parts = [f"\n### {kind.__name__}\n"]
    if text:
        parts.append(f"\n{text}\n")
    hints = typing.get_type_hints(kind, include_extras=True)
    sources = _fields(kind)
    encoded = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    known = [name for name in encoded if hints[name] not in (Ignored, Unsupported)]
    if known:
        rows = []
        for name in known:
            source = sources.get(name, Field(name, str(hints[name]), "", ""))
            default = source.default.replace("msgspec.UNSET", "left out")
            shown = code(default) if default else "**required**"
            rows.append((code(encoded[name]), code(source.type), shown, source.text))
        parts.append("\n" + table(("field", "type", "default", "meaning"), rows))
    ignored = [code(encoded[name]) for name in encoded if hints[name] == Ignored]
    if ignored:
        parts.append(f"\nAccepted without effect: {', '.join(ignored)}.\n")
    refused = [name for name in encoded if hints[name] == Unsupported]
    if refused:
        parts.append("\nRefused, unless the value asks for what happens anyway:\n\n")
        rows = [
            (
                code(encoded[name]),
                ", ".join(code(repr(value)) for value in SAME_AS_ABSENT.get(name, ())),
                INSTEAD.get(name, "leave it out"),
            )
            for name in refused
        ]
        parts.append(table(("field", "accepted values", "remedy"), rows))
    return "".join(parts)


def page() -> str:
    known = routes()
    rows = []
    for endpoint in known:
        takes = "" if endpoint.body is None else _link(endpoint.body)
        gives = _link(endpoint.answer) + (", or events" if EVENTS in endpoint.media else "")
        methods = ", ".join(endpoint.methods)
        rows.append((methods, code(endpoint.path), _key(endpoint), takes, gives, endpoint.summary))
    parts = [HEAD, table(("method", "path", "key", "takes", "gives", "summary"), rows)]
    taken = {kind: None for e in known if e.body is not None for kind in _structs(e.body)}
    answers = [ErrorBody, *(endpoint.answer for endpoint in known)]
    given = {kind: None for answer in answers for kind in _structs(answer)}
    parts.append("\n## Bodies of requests\n")
    parts += [_struct(kind) for kind in taken]
    parts.append("\n## Answers\n")
    parts += [_struct(kind) for kind in given if kind not in taken]
    return "".join(parts)
