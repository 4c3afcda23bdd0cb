"""Open WebUI: three turns through its server, one with a forced call (pip open-webui).

The tool is one of its own, in Python; it runs the call and asks the model again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from relay import Relay
from reporting import KEY, MODEL, URL, main

COMMAND = str(Path(sys.executable).parent / "open-webui")
START_LIMIT_S = 300
TOOL = '''
class Tools:
    def remembered_colour(self) -> str:
        """
        The colour that the user likes.
        """
        return "teal"
'''


class WebUi:
    """One `open-webui serve` with data of its own, ended by its pid."""

    def __init__(self, upstream: str, folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._token = ""
        self._log = Path(folder, "log")
        environment = {
            **os.environ,
            "DATA_DIR": folder, "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "x",
            "OPENAI_API_BASE_URL": f"{upstream}/v1", "OPENAI_API_KEY": KEY,
            "ENABLE_OLLAMA_API": "False", "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1",
            "RAG_EMBEDDING_ENGINE": "openai", "ENABLE_VERSION_UPDATE_CHECK": "False",
            "DO_NOT_TRACK": "true", "ANONYMIZED_TELEMETRY": "False",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(port)],
            stdout=self._log.open("w"), stderr=subprocess.STDOUT, env=environment, cwd=folder,
        )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self.call("GET", "/health")
                break
            except (OSError, urllib.error.URLError):
                alive = self._process.poll() is None and time.monotonic() < deadline
                assert alive, self._log.read_text()[-600:]
                time.sleep(1)
        signed = self.call("POST", "/api/v1/auths/signin", {"email": "", "password": ""})
        self._token = signed["token"]

    def call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(START_LIMIT_S)


def turns() -> None:
    relay = Relay(URL)
    with tempfile.TemporaryDirectory(prefix="manyroots-webui-") as folder:
        webui = WebUi(relay.url, folder)
        try:
            webui.wait()
            _converse(webui, relay)
        finally:
            webui.stop()
            relay.close()
            if path := os.environ.get("MANYROOTS_CAPTURE"):
                lines = [json.dumps(vars(item)) for item in relay.exchanges]
                Path(path).write_text("\n".join(lines))
    assert not relay.refused(), relay.refused()
    assert relay.forced == ["remembered_colour"], relay.forced
    later = [str(item.body) for item in relay.generations]
    assert any("teal" in body and "'role': 'tool'" in body for body in later), "no result came back"


def _converse(webui: WebUi, relay: Relay) -> None:
    listed = [model["id"] for model in webui.call("GET", "/api/models")["data"]]
    assert MODEL in listed, listed
    tool = {"id": "colour", "name": "colour", "content": TOOL, "meta": {"description": "colours"}}
    webui.call("POST", "/api/v1/tools/create", tool)
    messages: list[dict[str, Any]] = []
    chat: str | None = None
    parent: str | None = None
    for number, words in enumerate(("Say hello.", "Which colour do I like?", "Say goodbye.")):
        asked, answered = f"asked-{number}", f"answered-{number}"
        user = {"id": asked, "parentId": parent, "role": "user", "content": words}
        messages.append({"role": "user", "content": words})
        # As its page sends them: with a session, it runs tools itself and asks again.
        body: dict[str, Any] = {
            "model": MODEL, "messages": messages, "stream": True, "session_id": "by-script",
            "id": answered, "parent_id": parent, "user_message": user, "background_tasks": {},
        }  # fmt: skip
        if chat is not None:
            body["chat_id"] = chat
        if number == 1:
            relay.force("remembered_colour")
            body |= {"tool_ids": ["colour"], "params": {"function_calling": "native"}}
        chat = chat or webui.call("POST", "/api/chat/completions", body)["chat_id"]
        if number:
            webui.call("POST", "/api/chat/completions", body)
        said = _awaited(webui, chat, answered)
        messages.append({"role": "assistant", "content": said or "..."})
        parent = answered


def _awaited(webui: WebUi, chat: str, message: str) -> str:
    deadline = time.monotonic() + 300
    while True:
        history = webui.call("GET", f"/api/v1/chats/{chat}")["chat"]["history"]["messages"]
        found = history.get(message, {})
        assert not found.get("error"), found["error"]
        if found.get("done"):
            return str(found.get("content", ""))
        assert time.monotonic() < deadline, "no answer was stored"
        time.sleep(0.5)


if __name__ == "__main__":
    main([turns])
