"""The page in a real Chromium, against a real server with adapters under load (G07)."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.adapter_server import ADMIN, AdapterServer
from tests.e2e.conftest import HEADERS, Server, running
from tests.e2e.test_browser import Site
from tests.helpers.chromium import Browser, Tab, chromium, find_chromium
from tests.helpers.page_server import (
    ATTACK,
    VIEWS,
    open_page,
    page_server,
    show,
    text_of,
    tiny_model,
    traffic,
)
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_adapters import TinyAdapters
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

pytestmark = pytest.mark.slow

PHONE = 390
SCRIPT = "<script>window.pwned=1</script>"
"""A model's name."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return tiny_model(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def served(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    with page_server(tiny) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("there is no Chromium and none can be installed: the page was NOT tried")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core, which checks pages for accessibility: screen readers and use without a mouse."""
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is not None:
        subprocess.run(
            [npm, "install", "--no-save", "--silent", "axe-core@4"], cwd=folder, check=False,
            capture_output=True, timeout=PATIENCE_S,
        )  # fmt: skip
    found = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not found.exists():
        pytest.skip("axe-core can't be had from npm: accessibility was NOT checked")
    return found.read_text()


def many_prompts(count: int) -> dict[str, Any]:
    """So many sequences of one request."""
    prompts = [[7, 8, 9, number % 90] for number in range(count)]
    return {"model": "tiny", "prompt": prompts, "max_tokens": 100, "ignore_eos": True}


def rows(tab: Tab) -> list[list[str]]:
    script = (
        "[...document.querySelectorAll('#view tbody tr')].map((row) =>"
        " [...row.cells].map((cell) => cell.innerText))"
    )
    found: list[list[str]] = tab.run(script)
    return found


def test_g07_every_view_shows_what_runs(served: AdapterServer, browser: Browser) -> None:
    """G07: with adapters under load, by mouse and keyboard, and no name becomes a script."""
    with traffic(served):
        tab = open_page(browser, served)
        tab.until("Number(document.querySelectorAll('.tile dd')[2].textContent) > 0")
        assert "pages cached" in text_of(tab)
        balanced = tab.run(
            "import('./page/store.js').then(({store}) => store.memory.filter((part) =>"
            " part[0] === 'device' && part[1] === 'pages').reduce((sum, part) => sum + part[5], 0))"
        )
        assert balanced == 512, "held, cached and free pages add up"

        show(tab, "requests")
        tab.until("document.querySelectorAll('#view tbody tr').length > 2")
        # Four adapters, of which two may run at once.
        tab.until(
            "[...document.querySelectorAll('#view strong')]"
            ".some((one) => ['adapter', 'load'].includes(one.textContent))"
        )

        show(tab, "adapters")
        tab.until("document.querySelectorAll('#view tbody tr').length === 4")
        assert not tab.run("document.querySelector('#view img')")

        show(tab, "steps")
        tab.until("document.querySelector('.steps-canvas').getAttribute('aria-valuemax') > 20")
        tab.run("document.querySelector('.steps-canvas').focus()")
        tab.press("ArrowLeft")
        tab.until("document.querySelectorAll('#view tbody tr').length > 0")
        tab.until("document.getElementById('main').innerText.includes('kernel by kernel')")

        show(tab, "cache")
        tab.until("document.querySelector('#view [role=status]').textContent.includes('runs')")
        tab.run("document.querySelector('.tree-canvas').focus()")
        tab.press("ArrowRight")
        tab.press("ArrowRight")
        told = tab.until("document.getElementById('node-facts').innerText.includes('Held by')")
        assert told
        assert "tenant-" not in text_of(tab), "a salt is shown"
        tab.press("Enter")
        tab.until("!document.querySelector('#view button').disabled")
        tab.press("Escape")
        tab.until("document.querySelector('#view button').disabled")

        show(tab, "compare")
        tab.until("document.querySelectorAll('#view input[type=checkbox]').length === 5")
        tab.run("document.querySelectorAll('#view input[type=checkbox]')[1].click()")
        tab.run("document.querySelectorAll('#view input[type=checkbox]')[4]?.click()")
        tab.run(
            "(() => { document.querySelector('textarea').value = 'hello';"
            " document.querySelector('#view input[type=number]').value = 12;"
            " document.querySelector('#view button.primary').click(); })()"
        )
        tab.until(
            "document.querySelectorAll('.measured').length === 3 &&"
            " [...document.querySelectorAll('.measured')]"
            ".every((one) => one.textContent.includes('prompt tokens cached'))"
        )
        assert not tab.run("document.querySelector('.said.failed')")

        show(tab, "whatif")
        tab.run("document.querySelector('#view button.primary').click()")
        tab.until(
            "document.querySelector('#view table') !== null ||"
            " document.querySelector('#view .error').textContent"
        )
        titles = tab.run("[...document.querySelectorAll('#view th')].map((one) => one.innerText)")
        assert titles[:3] == ["Figure", "As measured", "As it is, simulated"], text_of(tab)
        assert "Twice the memory" in titles
    assert tab.run("window.pwned") is None
    assert [trouble for trouble in tab.troubles() if "401" not in trouble] == []
    tab.close()


def test_g07_a_request_is_aborted_and_adapters_are_pinned_unloaded_and_loaded(
    served: AdapterServer, browser: Browser, tiny: TinyAdapters
) -> None:
    """G07: actions, with the key in a header."""
    tab = open_page(browser, served)
    body = many_prompts(100)
    with served.client.stream(
        "POST", "/v1/completions", json=body | {"stream": True}, headers=HEADERS
    ) as answer:
        # Paused, so that none ends by itself before the click.
        assert served.post("/pause?mode=keep", {}, ADMIN).status_code == 200
        try:
            show(tab, "requests")
            tab.until("document.getElementById('phase').textContent === 'paused'")
            tab.until("document.querySelectorAll('#view tbody button').length > 10")
            tab.run("document.querySelector('#view tbody button').click()")
            said = "".join(answer.iter_text())
        finally:
            assert served.post("/resume", {}, ADMIN).status_code == 200
    assert "gave up" in said
    show(tab, "adapters")
    button = (
        "[...document.querySelectorAll('#view tbody button')]"
        ".find((one) => one.getAttribute('aria-label') === '{}')"
    )
    served.complete("few", [1, 2, 3])
    tab.until(button.format("Pin few") + " !== undefined")
    tab.run(button.format("Pin few") + ".click()")
    tab.until(button.format("Unpin few") + " !== undefined")
    tab.run(button.format("Unload few") + ".click()")
    tab.until("document.querySelectorAll('#view tbody tr').length === 3")
    tab.run(
        "(() => { const [name, path] = document.querySelectorAll('#view form input');"
        f" name.value = 'few'; path.value = {json.dumps(tiny.path('few'))};"
        " document.querySelector('#view form button').click(); })()"
    )
    tab.until("document.querySelectorAll('#view tbody tr').length === 4")
    tab.close()


def test_g07_a_thousand_requests(served: AdapterServer, browser: Browser) -> None:
    """G07: paused until all have come; then none is over before the page has shown them."""
    body = many_prompts(250) | {"max_tokens": 200}
    stop = threading.Event()
    tab = open_page(browser, served)

    def ask() -> None:
        with served.client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}, headers=HEADERS
        ) as answer:
            for _ in answer.iter_bytes():
                if stop.is_set():
                    return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    assert served.post("/pause?mode=keep", {}, ADMIN).status_code == 200
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while served.server.get("/load").json()["server_load"] != 1000:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # From the first step on, those that are not computed say why.
        assert served.post("/resume", {}, ADMIN).status_code == 200
        served.server.wait_for("vllm:num_requests_running", lambda value: value > 0)
        show(tab, "requests")
        tab.until(
            "/of (9\\d\\d|1,000) requests/"
            ".test(document.querySelector('#view [role=status]').textContent)"
        )
        assert len(rows(tab)) == 50
        tab.until("/budget|memory/.test(document.querySelector('#view tbody').innerText)")
        tab.run(
            "[...document.querySelectorAll('#view button')]"
            ".find((one) => one.textContent === 'Later').click()"
        )
        tab.until("document.querySelector('#view [role=status]').textContent.startsWith('51')")
    finally:
        stop.set()
        assert served.post("/resume", {}, ADMIN).status_code == 200
        for thread in threads:
            thread.join(PATIENCE_S)
    served.server.wait_until_idle()
    tab.close()


def fake_tree(num_nodes: int) -> dict[str, Any]:
    """Shared heads with many ends."""
    nodes: dict[str, list[Any]] = {}
    for number in range(1, num_nodes + 1):
        parent = 0 if number <= 20 else (number - 1) // 12 if number > 300 else 1 + number % 20
        marks = [1, 0, 2] if number % 50 == 0 else []
        space = nodes[str(parent)][2] if parent else 1 + number % 5
        nodes[str(number)] = [
            number, parent, space, 2 + number % 9, [2 + number % 9, 1 if marks else 0],
            number, number % 7, number % 11 == 0, 1, marks,
        ]  # fmt: skip
    planes = [["full", "full", "device", 99999, 10, 80000, 19989],
              ["window 64", "window", "device", 999, 9, 900, 90]]  # fmt: skip
    spaces = [[1, None, 0], [2, "pirate", 1], [3, "pirate", 2], [4, "butler", 0], [5, ATTACK, 3]]
    return {"page_size": 16, "tick": num_nodes + 5, "planes": planes, "namespaces": spaces,
            "next_evicted": [[number, 3] for number in range(9000, 9800)],
            "nodes": nodes}  # fmt: skip


NUM_PIXELS = """(name) => {
  const canvas = document.querySelector(".tree-canvas");
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  const wanted = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(wanted.slice(at, at + 2), 16));
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    found += data[i] === r && data[i + 1] === g && data[i + 2] === b;
  }
  return found;
}"""
"""Pixels of the tree that have a colour of the style sheet."""


def num_pixels(tab: Tab, colour: str) -> int:
    """Waits till there are some: a worker draws the tree."""
    return int(tab.until(f"({NUM_PIXELS})('{colour}')"))


def test_g07_ten_thousand_nodes_take_at_most_8_ms_a_frame(
    served: AdapterServer, browser: Browser
) -> None:
    """G07: script and layout, in processor time of the page's thread. Without its key the page gets
    no data, so that all frames are those that are asked for here."""
    tab = browser.open(served.server.url + "/#cache")
    tab.until("document.getElementById('key-dialog').open")
    tab.run("document.getElementById('key-dialog').close()")
    tab.run(f"showTree({json.dumps(fake_tree(10_000))})")
    tab.until("document.querySelector('#view [role=status]').textContent.includes('10,000 runs')")
    tab.run("document.querySelector('.tree-canvas').focus()")
    frames = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
    for _ in range(3):
        tab.press("ArrowRight")
        tab.run(frames)
    tab.until("document.getElementById('node-facts').innerText.includes('Held by')")
    whole = num_pixels(tab, "--device")
    assert whole > 50
    costs = []
    for number in range(12):
        before = tab.metrics()
        # Zooming in and out draws all that is in sight anew.
        tab.press("Enter" if number % 2 == 0 else "Escape")
        tab.run(frames)
        after = tab.metrics()
        names = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
        costs.append(1000 * sum(after[name] - before[name] for name in names))
    print(f"script and layout of a frame, ms: {[round(cost, 1) for cost in costs]}")
    assert max(costs) <= 8.0
    tab.press("Enter")
    tab.run(frames)
    tab.until(f"({NUM_PIXELS})('--device') !== {whole}")
    tab.close()


def test_g07_a_phones_width_and_a_dark_theme(served: AdapterServer, browser: Browser) -> None:
    """G07: nothing is wider than the screen."""
    served.complete("all", [1, 2, 3, 4, 5, 6, 7, 8])
    tab = open_page(browser, served, width=PHONE, height=800)
    tab.resize(PHONE, 800, is_phone=True)
    tab.scheme("dark")
    for view in VIEWS:
        show(tab, view)
        assert tab.run("document.documentElement.scrollWidth") <= PHONE, view
    tab.close()


def test_g07_axe_finds_nothing_serious(served: AdapterServer, browser: Browser, axe: str) -> None:
    """G07: in every view, light and dark."""
    with traffic(served, 3):
        tab = open_page(browser, served)
        tab.run(axe)
        for scheme in ("light", "dark"):
            tab.scheme(scheme)
            for view in VIEWS:
                show(tab, view)
                found = tab.run(
                    "axe.run(document, {resultTypes: ['violations']}).then((result) =>"
                    " result.violations.filter((one) => /serious|critical/.test(one.impact))"
                    ".map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 120))]))"
                )
                assert found == [], (scheme, view)
        tab.close()


def test_g07_no_prompt_token_or_salt_in_any_byte(served: AdapterServer) -> None:
    """G07: marked prompts, token ids and salts, in all that the page's routes answer."""
    marked = [211, 223, 227, 229, 233, 239, 241, 251]
    secrets = [b"XYZZY", b"plugh-salt", b"211,223,227,229", b"211, 223, 227", bytes(marked)]
    everything = b""
    with served.client.stream("GET", "/page/stream?tree=1", headers=ADMIN) as answer:
        for number in range(6):
            body = {"model": "all", "prompt": marked * 6, "max_tokens": 8, "ignore_eos": True,
                    "cache_salt": "plugh-salt"}  # fmt: skip
            assert served.post("/v1/completions", body).status_code == 200
            text = {"model": "tiny", "prompt": "XYZZY " * (number + 2), "max_tokens": 4}
            assert served.post("/v1/completions", text).status_code == 200
        num_trees = 0
        for data in answer.iter_bytes():
            everything += data
            num_trees = len(re.findall(rb"event: tree", everything))
            if num_trees >= 2 and everything.count(b"event: change") >= 3:
                break
    step = re.findall(rb'"steps":\[\[(\d+)', everything)[-1].decode()
    for path in ("/page/trace", f"/page/step?id={step}", "/", "/page/app.js", "/metrics"):
        headers = {**ADMIN, "accept": "text/html"} if path != "/metrics" else HEADERS
        answered = served.client.get(path, headers=headers)
        assert answered.status_code == 200, path
        everything += answered.content
    simulated = served.client.post("/page/simulate", json={"variants": []}, headers=ADMIN)
    assert simulated.status_code == 200, simulated.text
    everything += simulated.content
    assert b'"pages":[' in everything
    assert [secret for secret in secrets if secret in everything] == []


def test_g07_the_trace_is_read_by_simulate(served: AdapterServer, tmp_path: Path) -> None:
    """G07: and what was reused is reused there, replies that are quoted included."""
    first = served.complete("tiny", [50, 51, 52, 53] * 4, 16)
    reply = first.json()["choices"][0]["token_ids"]
    served.complete("tiny", [50, 51, 52, 53] * 4 + reply + [60], 4)
    file = tmp_path / "trace.jsonl"
    file.write_text(served.client.get("/page/trace", headers=ADMIN).text)
    last = [json.loads(line) for line in file.read_text().splitlines()][-2:]
    assert last[0]["pages"][:7] == last[1]["pages"][:7]
    result = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, "-m", "manyroots.cli", "simulate", str(file), "--block-size", "4",
         "--num-pages", "2000", "--json", str(result)],
        check=True, capture_output=True,
    )  # fmt: skip
    sequences = json.loads(result.read_text())["sequences"]
    assert sequences[-1]["num_cached_tokens"] >= 28


def test_g07_an_engine_that_is_killed_is_shown_until_it_is_back(
    served: AdapterServer, browser: Browser
) -> None:
    """G07"""
    tab = open_page(browser, served)
    served.complete("all", [1, 2, 3, 4, 5])
    show(tab, "steps")
    tab.until("document.querySelector('#view [role=status]').textContent.includes('average')")
    os.kill(served.server.children()[0], signal.SIGKILL)
    tab.until("document.getElementById('phase').textContent === 'restarting'")
    assert "has died" in text_of(tab)
    tab.until("document.getElementById('phase').textContent === 'ready'")
    tab.until("!document.getElementById('notice').textContent.includes('died')")
    served.complete("all", [1, 2, 3, 4, 5])
    tab.until("document.querySelector('#view [role=status]').textContent.includes('average')")
    show(tab, "adapters")
    tab.until("document.querySelectorAll('#view tbody tr').length === 4")
    tab.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with recurrent layers and a host tier, without any key, and with a script's name."""
    folder = tmp_path_factory.mktemp("hybrid")
    save_tiny(folder, "lfm2", vocab_size=300)
    tiny_backend().save(str(folder / "tokenizer.json"))
    with running(
        str(folder), "--served-model-name", SCRIPT, "--block-size", "4",
        "--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--num-host-pages", "64",
    ) as server:  # fmt: skip
        server.wait_until_ready()
        yield server


def test_g07_saved_states_and_host_copies_are_seen(hybrid: Server, browser: Browser) -> None:
    """G07: by their colours in the tree, in the facts of a run, and in the memory's bars."""
    rng = random.Random(1)
    head = [rng.randrange(3, 300) for _ in range(24)]
    for _ in range(16):  # more pages than the device has
        prompt = head + [rng.randrange(3, 300) for _ in range(16)]
        body = {"model": SCRIPT, "prompt": prompt, "max_tokens": 5, "ignore_eos": True}
        asked = httpx.post(hybrid.url + "/v1/completions", json=body, timeout=PATIENCE_S)
        assert asked.status_code == 200, asked.text
    tab = browser.open(hybrid.url + "/")
    tab.until("document.getElementById('main').innerText.includes('checkpoints')")
    assert re.search(r"\nhost\n.*\npages cached .*\n(?s:.*)checkpoints", text_of(tab))
    show(tab, "cache")
    tab.until("document.querySelector('#view .legend').innerText.includes('state saved')")
    said = tab.run("document.querySelector('#view [role=status]').textContent")
    assert re.search(r"full on the host: 0 held, [1-9]\d* cached", said), said
    assert re.search(r"state on the device: 0 held, [1-9]\d* cached", said), said
    assert num_pixels(tab, "--states") > 10
    tab.run("document.querySelector('.tree-canvas').focus()")
    tab.press("ArrowRight")
    told = "document.getElementById('node-facts').innerText"
    tab.until(f"{told}.includes('saved state') && {told}.includes('on the device, 6 on the host')")
    tab.press("ArrowRight")
    tab.until(f"/\\n3 on the host/.test({told})")
    tab.close()


def test_g07_without_a_key_it_is_read_only_and_other_sites_see_nothing(
    hybrid: Server, browser: Browser
) -> None:
    """G07: cross-site requests of a real browser, to a server that this machine may look at."""
    tab = browser.open(hybrid.url + "/")
    tab.until("document.getElementById('phase').textContent === 'ready'")
    assert "Read-only" in text_of(tab)
    assert "<script>" in tab.run("document.getElementById('served').innerText")
    assert tab.run("window.pwned") is None
    tab.close()
    site = Site()
    other = browser.open(site.origin + "/?server=" + hybrid.url)
    tried = other.run(
        "Promise.all(['stream', 'trace', 'step?id=1'].map((path) => fetch("
        f"'{hybrid.url}/page/' + path).then((a) => a.status, (error) => String(error))))"
    )
    assert all("Failed to fetch" in str(one) for one in tried), tried
    other.run(
        f"fetch('{hybrid.url}/page/simulate', {{method: 'POST', mode: 'no-cors',"
        " body: '{\"variants\": []}'}).then(() => 0)"
    )
    frame = other.run(
        "new Promise((done) => { const frame = document.createElement('iframe');"
        f" frame.src = '{hybrid.url}/'; frame.onload = () => {{ let seen = 'nothing';"
        " try { seen = frame.contentDocument?.title ?? 'nothing'; } catch {}"
        " done(seen); }; document.body.append(frame);"
        " setTimeout(() => done('nothing'), 3000); })"
    )
    assert frame == "nothing"
    other.close()
    site.close()
