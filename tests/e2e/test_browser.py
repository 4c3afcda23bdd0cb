"""A page of plain HTML, from another origin than the server's, in a real browser."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.e2e.conftest import API_KEY, SETTINGS, Server, running
from tests.helpers.chromium import Browser, chromium, find_chromium
from tests.helpers.patience import PATIENCE_S

pytestmark = pytest.mark.slow

PAGE = """<!doctype html><meta charset="utf-8"><title>chat</title><pre id="answer"></pre><script>
const report = (what) => fetch('/report', {method: 'POST', body: JSON.stringify(what)});
const ask = async (server, key) => {
  const answer = await fetch(server + '/v1/chat/completions', {
    method: 'POST',
    headers: {'content-type': 'application/json', 'authorization': 'Bearer ' + key},
    body: JSON.stringify({model: 'smollm2-135m-instruct', max_tokens: 12, temperature: 0,
      stream: true, messages: [{role: 'user', content: 'What is the capital of France?'}]}),
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '', pieces = 0, rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) break;
    const events = (rest + value).split('\\n\\n');
    rest = events.pop();
    for (const event of events) {
      if (event === 'data: [DONE]') continue;
      const delta = JSON.parse(event.slice(6)).choices[0]?.delta?.content;
      if (delta) { text += delta; pieces += 1; document.getElementById('answer').append(delta); }
    }
  }
  return {status: answer.status, text, pieces};
};
const given = new URLSearchParams(location.search);
ask(given.get('server'), given.get('key')).then(report, (error) => report({error: String(error)}));
</script>"""


class Site:
    """Serves the page, and takes what it reports."""

    def __init__(self) -> None:
        reports: queue.Queue[dict[str, Any]] = queue.Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(PAGE.encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self._answer(b"")
                reports.put(json.loads(body))

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Says nothing."""

        self.reports = reports
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("there is no Chromium and none can be installed: pages were NOT tried")
    with chromium() as browser:
        yield browser


def shown(site: Site, server: Server, browser: Browser) -> dict[str, Any]:
    """What the page reports when a browser shows it."""
    tab = browser.open(f"{site.origin}/?server={server.url}&key={API_KEY}")
    try:
        return site.reports.get(timeout=PATIENCE_S)
    finally:
        tab.close()


def test_a_page_of_an_allowed_origin_streams_a_chat_g10(site: Site, browser: Browser) -> None:
    """G10"""
    with running(*SETTINGS, "--allowed-origins", site.origin) as server:
        server.wait_until_ready()
        report = shown(site, server, browser)
    assert report.get("status") == 200, report
    assert "Paris" in report["text"]
    assert report["pieces"] > 1


def test_a_page_of_another_origin_is_refused_g10(
    site: Site, server: Server, browser: Browser
) -> None:
    """G10: without --allowed-origins the browser lets no page read an answer."""
    assert "Failed to fetch" in shown(site, server, browser)["error"]
