"""GET /openapi.json and GET /docs: what this server takes and gives, from the types that check it.

Takes the endpoints; gives OpenAPI 3.1. The page needs no other host: it reads the document and
lists it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, get_type_hints

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from manyroots.api.endpoints import HTML, JSON, Endpoint
from manyroots.api.errors import ANTHROPIC_PATHS, ErrorBody
from manyroots.api.middleware import OPEN_PATHS
from manyroots.api.requests import Ignored, Unsupported
from manyroots.version import __version__

_TEMPLATE = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
_NOTES = {
    Ignored: "Accepted, without effect.",
    Unsupported: "Refused, unless it asks for what happens anyway.",
}


def document(endpoints: Iterable[Endpoint], *, root_path: str = "") -> dict[str, Any]:
    """The whole document."""
    known = list(endpoints)
    kinds = [ErrorBody, *(kind for e in known for kind in (e.body, e.answer) if _is_struct(kind))]
    _, components = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=_TEMPLATE)
    for kind in kinds:
        _describe(kind, components)
    paths: dict[str, Any] = {}
    for endpoint in known:
        for method in endpoint.methods:
            path = _PARAMETER.sub(r"{\1}", endpoint.path)
            paths.setdefault(path, {})[method.lower()] = _operation(endpoint, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "manyroots", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _describe(kind: Any, components: dict[str, Any]) -> None:
    """Say of fields that have no type what becomes of them."""
    fields = components.get(kind.__name__, {}).get("properties", {})
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for marker, note in _NOTES.items():
            if hint == marker and name in fields:
                fields[name] = {**fields[name], "description": note}


def _operation(endpoint: Endpoint, method: str) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "A good answer."}
    contents = {media: {"schema": _schema(endpoint.answer)} for media in endpoint.media}
    for media in contents:
        if media != JSON:
            contents[media] = {"schema": {"type": "string"}}
    good["content"] = contents
    operation: dict[str, Any] = {
        "operationId": _name(endpoint.path, method),
        "summary": endpoint.summary + (" Needs the admin key." if endpoint.is_admin else ""),
        "responses": {"200": good, "4XX": _error(endpoint.path), "503": _error(endpoint.path)},
    }
    parameters = [
        {"name": match[1], "in": "path", "required": True, "schema": {"type": "string"}}
        for match in _PARAMETER.finditer(endpoint.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None and method == "POST":
        operation["requestBody"] = {
            "required": endpoint.needs_json,
            "content": {JSON: {"schema": _schema(endpoint.body)}},
        }
    if endpoint.path in OPEN_PATHS:
        operation["security"] = []
        operation["responses"]["503"] = good
    return operation


def _schema(kind: Any) -> dict[str, Any]:
    if _is_struct(kind):
        return {"$ref": _TEMPLATE.format(name=kind.__name__)}
    return {"type": "object"}


def _error(path: str) -> dict[str, Any]:
    kind = dict if path.startswith(ANTHROPIC_PATHS) else ErrorBody
    return {
        "description": "What was wrong, and what to do.",
        "content": {JSON: {"schema": _schema(kind)}},
    }


def _name(path: str, method: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", _PARAMETER.sub(r"\1", path))
    return "_".join([method.lower(), *words])


def openapi_endpoints(endpoints: Iterable[Endpoint], *, root_path: str) -> list[Endpoint]:
    """The routes that show the document, which has them, too."""

    @cache
    def text() -> bytes:
        """Made when a client first asks: most servers never need it, and it would delay a start."""
        return msgspec.json.encode(document([*known, *own], root_path=root_path))

    async def show(request: Request) -> Response:
        return Response(await run_in_threadpool(text), media_type=JSON)

    async def docs(request: Request) -> Response:
        return HTMLResponse(page)

    known = list(endpoints)
    own = [
        Endpoint("/openapi.json", show, "This document."),
        Endpoint("/docs", docs, "This document as a page.", media=(HTML,)),
    ]
    page = _PAGE.replace("ROOT", root_path)
    return own


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>manyroots</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer } b { display: inline-block; width: 4rem } code, pre { font-size: 13px }
details { margin: .3rem 0 } pre { background: #8881; padding: .6rem; overflow: auto }
</style>
<h1>manyroots</h1>
<p>What this server takes and gives, by <a href="ROOT/openapi.json">its OpenAPI document</a>.</p>
<main></main>
<script>
const make = (kind, text) => Object.assign(document.createElement(kind), {textContent: text});
const shape = (schema, all, depth = 0) => {
  if (schema.$ref) return shape(all[schema.$ref.split("/").pop()], all, depth);
  if (!schema.properties || depth > 3) return schema;
  return Object.fromEntries(Object.entries(schema.properties).map(
    ([name, value]) => [name, shape(value, all, depth + 1)]));
};
fetch("ROOT/openapi.json").then(answer => answer.json()).then(doc => {
  const main = document.querySelector("main"), all = doc.components.schemas;
  for (const [path, methods] of Object.entries(doc.paths))
    for (const [method, operation] of Object.entries(methods)) {
      const details = document.createElement("details"), summary = make("summary", "");
      summary.append(make("b", method.toUpperCase()), make("code", path), " " + operation.summary);
      details.append(summary);
      const body = operation.requestBody?.content["application/json"].schema;
      if (body) details.append(make("p", "Takes"),
        make("pre", JSON.stringify(shape(body, all), null, 2)));
      const good = operation.responses["200"].content["application/json"]?.schema;
      if (good) details.append(make("p", "Gives"),
        make("pre", JSON.stringify(shape(good, all), null, 2)));
      main.append(details);
    }
});
</script>
</html>
"""
