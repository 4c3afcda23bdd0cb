"""Statements of the docs that the code can check."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from manyroots.api.app import endpoints
from manyroots.cache.cache import PrefixCache
from manyroots.cli.main import main
from manyroots.config import LoraSettings
from manyroots.scheduler.scheduler import Scheduler
from tests.unit.api.harness import Harness

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CLASSES = {"PrefixCache": PrefixCache, "Scheduler": Scheduler}
PATHS = {"/v1/models/{name:path}": "/v1/models/tiny", "/page/{file}": "/page/app.js"}
KEYS = {"api_key": "for-the-api", "admin_key": "for-the-admin"}


def json_blocks(page: Path) -> list[str]:
    return re.findall(r"^```json\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", json_blocks(DOCS / "simulate.md"))
def test_b05_the_trace_lines_in_the_docs_are_taken_by_their_command(
    block: str, tmp_path: Path
) -> None:
    """B05."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(block)
    results = tmp_path / "results.json"
    assert main(["simulate", str(trace), "--json", str(results)]) == 0
    assert json.loads(results.read_text())


def test_calls_that_the_docs_name_exist() -> None:
    named = {
        found
        for page in DOCS.glob("*.md")
        for found in re.findall(r"`(PrefixCache|Scheduler)\.(\w+)", page.read_text())
    }
    assert ("PrefixCache", "claim") in named
    missing = [f"{cls}.{call}" for cls, call in sorted(named) if not hasattr(CLASSES[cls], call)]
    assert not missing


@pytest.mark.parametrize("page", ["coming-from.md", "concepts.md", "requirements.md"])
def test_no_page_names_the_cache_call_reserve(page: str) -> None:
    """It became `claim`, `onboard` and `extend`; architecture.md says why."""
    assert not hasattr(PrefixCache, "reserve")
    assert not re.findall(r"\breserve\b", (DOCS / page).read_text())


def routes_by_key() -> dict[str, str]:
    """The table of docs/operating.md: route -> key."""
    text = (DOCS / "operating.md").read_text()
    [section] = re.findall(r"^## Which routes need a key\n(.*?)^## ", text, re.M | re.S)
    rows = re.findall(r"^\| (none|API|admin) \| (.*) \|$", section, re.MULTILINE)
    found = [(route, key) for key, cell in rows for route in re.findall(r"`([^`]+)`", cell)]
    assert len(dict(found)) == len(found), "a route is named twice"
    return dict(found)


@pytest.mark.anyio
async def test_the_table_of_keys_is_what_the_server_asks_for() -> None:
    """Each route is asked without a key and with the API's, and the refusals are compared."""
    lora = LoraSettings(enable_lora=True)
    server = Harness(lora=lora, enable_lora_endpoints=True, **KEYS)
    found = {}
    async with server.client as client:
        for endpoint in endpoints(server.settings):
            path = PATHS.get(endpoint.path, endpoint.path)
            method = endpoint.methods[0]
            bare = await client.request(method, path)
            if bare.status_code != 401:
                found[endpoint.path] = "none"
                continue
            headers = {"authorization": f"Bearer {KEYS['api_key']}"}
            keyed = await client.request(method, path, headers=headers)
            found[endpoint.path] = "admin" if keyed.status_code == 403 else "API"
            headers = {"x-api-key": KEYS["admin_key"]}
            if found[endpoint.path] == "API":
                assert (await client.request(method, path, headers=headers)).status_code == 401
    assert found == routes_by_key()


@pytest.mark.anyio
async def test_without_an_admin_key_its_routes_do_not_exist() -> None:
    server = Harness()
    known = {endpoint.path for endpoint in endpoints(server.settings)}
    admin = {route for route, key in routes_by_key().items() if key == "admin"}
    local = {"/page/stream", "/page/step", "/page/trace", "/page/simulate"}
    assert known & admin == local
    # The client's address is not this machine's loopback name: the Host header says "test".
    assert (await server.get("/page/step")).status_code == 403
    assert (await server.post("/pause", None)).status_code == 404
    assert (await server.get("/v1/models")).status_code == 200
