"""A real server of a tiny model with adapters and traffic, and a browser that shows its page."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.adapter_server import AdapterServer, serving
from tests.e2e.conftest import HEADERS
from tests.helpers.chromium import Browser, Tab
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_adapters import TinyAdapters
from tests.helpers.tiny_server import TEMPLATE

ADMIN_KEY = "the-admin"
VIEWS = ("overview", "cache", "steps", "requests", "adapters", "compare", "whatif")
ATTACK = "<img src=x onerror=window.pwned=1>"
"""A name that would be a script, were it ever taken for markup."""


def tiny_model(folder: Path) -> TinyAdapters:
    tiny = TinyAdapters(folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tiny.model / "tokenizer_config.json").write_text(json.dumps(config))
    return tiny


@contextlib.contextmanager
def page_server(
    tiny: TinyAdapters, *, with_attack: bool = True, **flags: int | str
) -> Iterator[AdapterServer]:
    modules = [f"{name}={tiny.path(name)}" for name in ("all", "few", "stable")]
    given: dict[str, int | str] = {"max-loras": 2, "max-queued-requests": 2000} | flags
    with serving(tiny, *modules, **given) as served:
        if with_attack:
            assert served.load(ATTACK, tiny.path("other")).status_code == 400, "refused as a name"
            assert served.load("other", tiny.path("other")).status_code == 200
        yield served


_PAUSE_S = 0.1
"""Between two requests of a client: the browser needs the processor, too."""


@contextlib.contextmanager
def traffic(served: AdapterServer, num_clients: int = 6) -> Iterator[None]:
    """Clients that ask one after the other, of all adapters and some tenants, until it ends."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        rng = random.Random(number)
        head = [5, 6, 7, 8] * 6
        while not is_over.is_set():
            model = rng.choice(served.names())
            prompt = head + [rng.randrange(20, 40) for _ in range(rng.choice((4, 12, 20)))]
            body: dict[str, Any] = {
                "model": model, "prompt": prompt, "max_tokens": rng.choice((20, 60)),
                "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            if number % 3 == 0:
                body["cache_salt"] = f"tenant-{number}"
            with contextlib.suppress(httpx.HTTPError):
                served.post("/v1/completions", body, HEADERS)
            is_over.wait(_PAUSE_S)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def open_page(browser: Browser, served: AdapterServer, **size: int) -> Tab:
    """The page with both keys, connected."""
    tab = browser.open(served.server.url + "/", **size)
    tab.until("document.getElementById('key-dialog').open")
    tab.run(
        "(() => { document.getElementById('admin-key').value = 'the-admin';"
        "document.getElementById('api-key').value = 'e2e-key';"
        "document.querySelector('#key-form button.primary').click(); })()"
    )
    tab.until("document.getElementById('phase').textContent === 'ready'")
    return tab


def show(tab: Tab, view: str) -> None:
    tab.run(f"location.hash = '{view}'")
    tab.until(f"document.querySelector('.views a[aria-current]')?.hash === '#{view}'")
    tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def text_of(tab: Tab) -> str:
    return str(tab.run("document.getElementById('main').innerText"))
