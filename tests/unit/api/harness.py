"""A server around a fake engine, spoken to in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.types import Message

from manyroots.api.app import create_app
from manyroots.api.state import ServerState, Service
from manyroots.config import LoraSettings
from manyroots.engine.adapter_table import AdapterTable
from manyroots.server_config import ServerSettings
from manyroots.text.chat import load_chat_template
from manyroots.text.tokenizer import Tokenizer
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.fake_engine import FakeEngine
from tests.unit.text.tiny_tokenizer import TEMPLATE, tiny_tokenizer


class Harness:
    """The app, its engine, and a client."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        *,
        template: str | None = TEMPLATE,
        loaded: bool = True,
        lora: LoraSettings | None = None,
        **settings: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        if lora is not None:
            self.engine.adapters = AdapterTable(lora.lora_modules)
        self.settings = ServerSettings(**settings)
        self.state = ServerState(self.engine, self.settings)
        self.tokenizer: Tokenizer = tiny_tokenizer(template)
        self.app = create_app(self.state)
        if loaded:
            chat = load_chat_template(self.tokenizer, None)
            self.state.loaded = Service(
                self.engine,
                self.tokenizer,
                chat,
                self.settings,
                model_name="tiny",
                lora=lora or LoraSettings(),
            )

    @property
    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        async with self.client as client:
            return await client.post(path, json=body, **more)

    async def get(self, path: str, **more: Any) -> httpx.Response:
        async with self.client as client:
            return await client.get(path, **more)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": prompt} | fields)

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        body = {"model": "tiny", "messages": messages} | fields
        return await self.post("/v1/chat/completions", body)

    @asynccontextmanager
    async def connected(self, path: str, body: Any) -> AsyncIterator[Connection]:
        """A request on a connection that the test can cut."""
        connection = Connection(path, body)
        task = asyncio.create_task(self.app(connection.scope, connection.receive, connection.send))
        try:
            yield connection
        finally:
            connection.gone.set()
            await asyncio.wait_for(task, PATIENCE_S)


class Connection:
    """Speaks ASGI for one request, as a web server would."""

    def __init__(self, path: str, body: Any) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self.gone = asyncio.Event()
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1", "scheme": "http", "server": ("test", 80), "root_path": "",
        }  # fmt: skip

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.put_nowait(message)


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events; the final mark as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error envelope, which must be complete."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
