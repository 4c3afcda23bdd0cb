"""A relay on loopback between an agent and the server: it records requests and can force a call.

Agents choose for themselves whether to call a tool, and a small model never does. `force(name)`
makes the next request that offers the tool demand it, in the words of the API that it came by. The
arguments of that call are bounded, since a random model never ends a text.
`min_tokens` keeps answers from being empty. All else passes through unchanged, event by event. No
dependency: each client has its own environment.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_OWN = frozenset(
    {"connection", "transfer-encoding", "keep-alive", "host", "content-length", "accept-encoding"}
)
"""Headers that each connection has of its own."""


@dataclass
class Exchange:
    """One request and what came back."""

    method: str
    path: str
    body: Any
    status: int = 0
    answer: str = ""


@dataclass
class Relay:
    """`url` is what the agent talks to; `exchanges` is what passed through."""

    upstream: str
    min_tokens: int = 0
    """Of every answer, if above 0: a random model may end at once, and some agents then fail."""
    exchanges: list[Exchange] = field(default_factory=list)
    forced: list[str] = field(default_factory=list)
    """Names of the tools that requests were made to demand."""

    def __post_init__(self) -> None:
        self._wanted: str | None = None
        self._arguments: Mapping[str, str] = {}
        self._lock = threading.Lock()
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def handle_any(self) -> None:
                relay._pass_on(self)

        for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
            setattr(Handler, f"do_{method}", Handler.handle_any)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def force(self, name: str, arguments: Mapping[str, str] | None = None) -> None:
        """The next request that offers the tool `name` must call it; with these `arguments`, for a
        tool that would run whatever a random model writes."""
        self._wanted, self._arguments = name, arguments or {}

    def close(self) -> None:
        self._server.shutdown()

    @property
    def generations(self) -> list[Exchange]:
        paths = ("/v1/messages", "/v1/responses", "/v1/chat/completions", "/v1/completions")
        return [item for item in self.exchanges if item.path.partition("?")[0] in paths]

    def refused(self) -> list[str]:
        """Every answer of 400 or above, in brief."""
        return [
            f"{item.method} {item.path}: {item.status} {item.answer[:300]}"
            for item in self.exchanges
            if item.status >= 400
        ]

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length") or 0)
        raw = handler.rfile.read(length)
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = None
        if self.min_tokens and isinstance(body, dict) and "messages" in body:
            body["min_tokens"] = self.min_tokens
            raw = json.dumps(body).encode()
        with self._lock:
            wanted = self._wanted
            if wanted is not None and _demand(body, handler.path, wanted, self._arguments):
                self.forced.append(wanted)
                self._wanted = None
                raw = json.dumps(body).encode()
            exchange = Exchange(handler.command, handler.path, body)
            self.exchanges.append(exchange)
        there = urllib.parse.urlsplit(self.upstream)
        connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=900)
        headers = {
            name: value for name, value in handler.headers.items() if name.lower() not in _OWN
        }
        try:
            connection.request(handler.command, handler.path, raw or None, headers)
            answer = connection.getresponse()
            exchange.status = answer.status
            handler.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OWN:
                    handler.send_header(name, value)
            handler.send_header("transfer-encoding", "chunked")
            handler.end_headers()
            parts: list[bytes] = []
            while part := answer.read1(65536):
                parts.append(part)
                handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                handler.wfile.flush()
            handler.wfile.write(b"0\r\n\r\n")
            exchange.answer = b"".join(parts).decode(errors="replace")
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True  # the agent left
        finally:
            connection.close()


def _demand(body: Any, path: str, name: str, arguments: Mapping[str, str]) -> bool:
    """Change the choice of tool in place; False where the request does not offer `name`."""
    tools = body.get("tools") if isinstance(body, dict) else None
    offered = [tool for tool in tools if _name(tool) == name] if isinstance(tools, list) else []
    if not offered:
        return False
    _fix(offered, arguments)
    _bound(offered)
    if path.startswith("/v1/messages"):
        body["tool_choice"] = {"type": "tool", "name": name}
    elif path.startswith("/v1/responses"):
        body["tool_choice"] = {"type": "function", "name": name}
    else:
        body["tool_choice"] = {"type": "function", "function": {"name": name}}
    return True


def _fix(tools: list[Any], arguments: Mapping[str, str]) -> None:
    """Allow one value for each of these arguments, in place."""
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or function.get("input_schema") or {}
        for name, value in arguments.items():
            schema["properties"][name]["enum"] = [value]


def _bound(schema: Any) -> None:
    """Limit every string and list of the schemas in `schema`, in place."""
    if isinstance(schema, list):
        for part in schema:
            _bound(part)
    elif isinstance(schema, dict):
        if schema.get("type") == "string" and "enum" not in schema:
            schema.setdefault("maxLength", 8)
        if schema.get("type") == "array":
            schema.setdefault("maxItems", 2)
        for part in schema.values():
            _bound(part)


def _name(tool: Any) -> Any:
    return tool.get("function", tool).get("name") if isinstance(tool, dict) else None
