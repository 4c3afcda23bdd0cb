"""A real Chromium without a window, spoken to over two pipes: no driver and no library.

Takes pages to open; gives what scripts in them return, pictures, and what they cost. Installed from
Debian's package where it is missing (`tests/helpers/debian.py`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.debian import command_of
from tests.helpers.patience import PATIENCE_S

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "--hide-scrollbars", "--mute-audio", "--disable-extensions",
    "--disable-background-networking", "--force-color-profile=srgb",
    "--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows",
    "--disable-background-timer-throttling",
)  # fmt: skip


class PageError(AssertionError):
    """What a script in the page threw."""


class Browser:
    """One process; messages are JSON that ends with a zero byte."""

    def __init__(self, command: str) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="manyroots-browser-", ignore_cleanup_errors=True
        )
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        # It reads messages from descriptor 3, and writes them to 4.
        link = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        folder = f"--user-data-dir={self._folder.name}"
        self._process = subprocess.Popen(
            ["bash", "-c", link, "browser", command, *FLAGS, folder],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(their_in)
        os.close(their_out)
        self._rest = b""
        self._number = 0
        self.events: deque[dict[str, Any]] = deque(maxlen=200_000)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            if not data:
                raise PageError("the browser is gone")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read

    def open(self, url: str, *, width: int = 1280, height: int = 860) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.call("Page.bringToFront")
        tab.resize(width, height)
        tab.go(url)
        return tab

    def close(self) -> None:
        with contextlib.suppress(OSError, PageError):
            os.write(self._out, b'{"id": 0, "method": "Browser.close"}\0')
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self.session = session
        self._target = target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self.session, **params)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=2 if is_phone else 1, mobile=is_phone,
        )  # fmt: skip

    def scheme(self, name: str) -> None:
        """light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"]
            raise PageError(thrown.get("exception", {}).get("description", str(thrown)))
        return answer["result"].get("value")

    def until(self, script: str, limit_s: float = PATIENCE_S) -> Any:
        """Wait till an expression is true; gives its value."""
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(PageError):
                if value := self.run(script):
                    return value
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText")
                raise PageError(f"it never came: {script}\n{str(text)[:3000]}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Enter": 13,
                 "Escape": 27, "Tab": 9, "Home": 36, "End": 35, " ": 32}  # fmt: skip
        named = {"key": key, "code": "Space" if key == " " else key,
                 "windowsVirtualKeyCode": codes[key]}  # fmt: skip
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def metrics(self) -> dict[str, float]:
        self.call("Performance.enable", timeDomain="threadTicks")
        return {one["name"]: one["value"] for one in self.call("Performance.getMetrics")["metrics"]}

    def troubles(self) -> list[str]:
        """Errors that the page has met so far: exceptions, refusals of its policy."""
        self.run("0")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self.session:
                continue
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] == "error":
                    found.append(f"{entry['text']} {entry.get('url', '')}")
        return found

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


def find_chromium() -> str | None:
    """The command; None where there is none and none can be installed."""
    return command_of("chromium", "chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    command = find_chromium()
    assert command is not None
    browser = Browser(command)
    try:
        yield browser
    finally:
        browser.close()
