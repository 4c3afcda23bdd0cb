"""The page's routes: what each caller gets, and that one look at the engine serves all pages."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from manyroots.api.page.hub import PageHub
from manyroots.api.page.routes import page_files
from manyroots.snapshot import NodeView, RequestView, Snapshot, StepExplained, StepRow, StepView
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.fake_engine import FakeEngine, nothing_to_see
from tests.unit.api.harness import Harness

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer the-admin"}
BROWSER = {"accept": "text/html,application/xhtml+xml"}
LOCAL = ("127.0.0.1", 51000)


def client_of(harness: Harness, address: tuple[str, int] = LOCAL) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(harness.app, raise_app_exceptions=False, client=address)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


async def get(harness: Harness, path: str, **more: Any) -> httpx.Response:
    async with client_of(harness) as client:
        return await client.get(path, **more)


async def first_events(hub: PageHub, count: int, *, wants_tree: bool = False) -> list[Any]:
    """(name, data) of a page's first events."""
    found: list[Any] = []
    stream = hub.stream(wants_tree=wants_tree)
    async for data in stream:
        match = re.fullmatch(rb"event: (\w+)\ndata: (.*)\n\n", data, re.S)
        if match is not None:
            found.append((match[1].decode(), json.loads(match[2])))
        if len(found) == count:
            break
    await stream.aclose()
    return found


async def test_g07_the_page_needs_no_key_and_runs_nothing_of_others() -> None:
    """G07"""
    harness = Harness(api_key="k", admin_key="the-admin")
    async with client_of(harness) as client:
        page = await client.get("/", headers=BROWSER)
        head = await client.head("/")
        assert (page.status_code, head.status_code) == (200, 200)
        assert head.content == b""
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        for path in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text):
            loaded = await client.get(f"/{path}")
            assert loaded.status_code == 200
            assert loaded.headers["x-content-type-options"] == "nosniff"
            tag = {"if-none-match": loaded.headers["etag"]}
            assert (await client.get(f"/{path}", headers=tag)).status_code == 304
        assert (await client.get("/page/stream")).status_code == 401
        assert (await client.get("/page/other.js")).status_code == 401  # as every unknown path


def test_g07_the_files_name_no_other_host_and_hold_no_script_in_markup() -> None:
    """G07"""
    for path, data in page_files().items():
        text = data.decode()
        found = re.findall(r"https?://[^\s\"'`]+", text)
        assert set(found) <= {"http://www.w3.org/2000/svg"}, path
        if path == "/":
            assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", text)
        assert "innerHTML" not in text
        assert "eval(" not in text


async def test_g07_without_the_page_there_is_none() -> None:
    """G07"""
    harness = Harness(page=False, admin_key="the-admin")
    assert "<html" not in (await get(harness, "/", headers=BROWSER)).text
    assert (await get(harness, "/page/app.js", headers=ADMIN)).status_code == 404
    assert (await get(harness, "/page/stream", headers=ADMIN)).status_code == 404


@pytest.mark.parametrize(
    ("headers", "address"),
    [
        ({}, ("10.1.2.3", 5000)),
        ({"x-forwarded-for": "10.1.2.3"}, LOCAL),
        ({"forwarded": "for=10.1.2.3"}, LOCAL),
        ({"host": "evil.example:8000"}, LOCAL),
        ({"host": "127.0.0.1.evil.example"}, LOCAL),
        ({"origin": "http://evil.example"}, LOCAL),
        ({"origin": "null"}, LOCAL),
        ({"sec-fetch-site": "cross-site"}, LOCAL),
        ({"sec-fetch-site": "same-site"}, LOCAL),
    ],
    ids=str,
)
async def test_g07_without_a_key_only_this_machine_sees_data(
    headers: dict[str, str], address: tuple[str, int]
) -> None:
    """G07: other machines, proxies, names pointed at this machine, and other sites' pages."""
    harness = Harness()
    async with client_of(harness, address) as client:
        for path in ("/page/step?id=1", "/page/trace", "/page/stream"):
            refused = await client.get(path, headers=headers)
            assert refused.status_code == 403, path
        posted = await client.post("/page/simulate", json={"variants": []}, headers=headers)
        assert posted.status_code == 403
    assert harness.engine.looks == []


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "LOCALHOST:1"])
async def test_g07_without_a_key_this_machine_may_look_and_do_nothing(host: str) -> None:
    """G07"""
    harness = Harness()
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert (await get(harness, "/page/trace", headers=headers)).status_code == 200
    async with client_of(harness) as client:
        aborted = await client.post("/page/abort", json={"request_id": 1}, headers=headers)
    assert aborted.status_code in (404, 405)


async def test_g07_with_a_key_data_and_actions_need_it() -> None:
    """G07"""
    harness = Harness(admin_key="the-admin", api_key="for-chats")
    async with client_of(harness) as client:
        for headers in ({}, {"authorization": "Bearer for-chats"}, {"cookie": "key=the-admin"}):
            for path in ("/page/step?id=1", "/page/trace", "/page/stream"):
                answer = await client.get(path, headers=headers)
                assert answer.status_code in (401, 403)
            aborted = await client.post("/page/abort", json={"request_id": 1}, headers=headers)
            assert aborted.status_code in (401, 403)
        assert (await client.get("/page/trace", headers=ADMIN)).status_code == 200
        gone = await client.post("/page/abort", json={"request_id": 77}, headers=ADMIN)
        assert gone.status_code == 404


async def test_g07_ten_pages_are_one_look() -> None:
    """G07: what all of them see was asked for once; with none open nothing is asked."""
    harness = Harness()
    hub = PageHub(harness.state)
    await asyncio.sleep(0)
    assert harness.engine.looks == []
    pages = [asyncio.create_task(first_events(hub, 2)) for _ in range(10)]
    seen = await asyncio.wait_for(asyncio.gather(*pages), PATIENCE_S)
    assert len(harness.engine.looks) <= 3
    for events in seen:
        assert [name for name, _ in events] == ["state", "change"]
    asked = len(harness.engine.looks)
    for _ in range(5):
        await asyncio.sleep(0.2)
    assert len(harness.engine.looks) == asked


async def test_g07_a_costly_look_is_repeated_later() -> None:
    """G07: at most half a percent of the engine's processor time."""
    engine = FakeEngine()
    engine.snapshot = lambda *asked: replace_cost(nothing_to_see(*asked), 0.02)
    hub = PageHub(Harness(engine).state)
    assert await hub._look() == pytest.approx(0.02 * 200)
    engine.snapshot = nothing_to_see
    assert await hub._look() == 0.5


def replace_cost(snapshot: Snapshot, cpu_s: float) -> Snapshot:
    return Snapshot(1, snapshot.stats, cpu_s, False, 0, [], [], {}, [], [], tree=snapshot.tree)


def row(number: int, num_output: int) -> RequestView:
    return RequestView(
        number, None, 0, "running", "", "", 0, 10, 10, num_output, 16, 0, 0, 0, "cold", 1, 5
    )


async def test_g07_only_what_changes_is_sent() -> None:
    """G07"""
    engine = FakeEngine()
    shown = [[row(1, 0), row(2, 0)], [row(1, 1), row(2, 0)], [row(2, 0), row(3, 0)]]
    steps = [[StepView(1, 0.0, 0.0, *[0] * 7, False, False, [])]] + 2 * [
        [StepView(1, 0.0, 2.5, *[0] * 7, False, False, [])]
    ]
    for _ in range(3):
        engine.running.update({1, 2, 3})  # type: ignore[arg-type]

    def snapshot(*asked: Any) -> Snapshot:
        place = min(len(engine.looks), 3) - 1
        stats = nothing_to_see(*asked).stats
        return Snapshot(1, stats, 0.0, False, 2, shown[place], [], {}, [], steps[place])

    engine.snapshot = snapshot
    harness = Harness(engine)
    hub = PageHub(harness.state)
    [(_, state), (_, second), (_, third)] = await asyncio.wait_for(first_events(hub, 3), PATIENCE_S)
    assert set(state["requests"]) == {"1", "2"}
    assert set(second["requests"]) == {"1"}
    assert set(third["requests"]) == {"3"}
    assert third["gone_requests"] == ["1"]
    # A step that ran when it was first seen is asked for again.
    assert [since for since, _, _ in engine.looks[:3]] == [0, 0, 1]


async def test_g07_a_page_that_is_opened_later_sees_no_request_of_before() -> None:
    """G07: the first state of a page is as new as the look that was made for it."""
    engine = FakeEngine()
    shown = [row(1, 0)]

    def snapshot(*asked: Any) -> Snapshot:
        seen = nothing_to_see(*asked)
        return replace(seen, num_requests=len(shown), requests=list(shown))

    engine.snapshot = snapshot
    hub = PageHub(Harness(engine).state)
    [(_, state)] = await asyncio.wait_for(first_events(hub, 1), PATIENCE_S)
    assert set(state["requests"]) == {"1"}
    shown[:] = [row(2, 0)]
    [(_, state)] = await asyncio.wait_for(first_events(hub, 1), PATIENCE_S)
    assert set(state["requests"]) == {"2"}


async def test_g07_the_tree_of_a_restarted_engine_holds_no_node_of_the_dead_one() -> None:
    """G07"""
    engine = FakeEngine()

    def snapshot(*asked: Any) -> Snapshot:
        seen = nothing_to_see(*asked)
        if seen.tree is None:
            return seen
        node = NodeView(7 + engine.num_restarts, 0, 1, 3, [3], 1, 0, False, 1, [])
        return replace(seen, tree=replace(seen.tree, nodes=[node]))

    engine.snapshot = snapshot
    hub = PageHub(Harness(engine).state)
    stream = hub.stream(wants_tree=True)
    nodes: set[str] = set()

    async def follow() -> None:
        async for data in stream:
            match = re.fullmatch(rb"event: (tree|tree_change)\ndata: (.*)\n\n", data, re.S)
            if match is None:
                continue
            told = json.loads(match[2])
            if match[1] == b"tree":
                nodes.clear()
            nodes.difference_update(told.get("gone_nodes", ()))
            nodes.update(told["nodes"])
            if engine.num_restarts:
                return
            engine.num_restarts = 1

    await asyncio.wait_for(follow(), PATIENCE_S)
    await stream.aclose()
    assert nodes == {"8"}


async def test_g07_an_engine_that_dies_is_told_and_begins_anew() -> None:
    """G07"""
    engine = FakeEngine()
    harness = Harness(engine)
    hub = PageHub(harness.state)
    stream = hub.stream(wants_tree=False)
    seen: list[tuple[str, str, bool]] = []

    async def follow() -> None:
        async for data in stream:
            match = re.fullmatch(rb"event: (\w+)\ndata: (.*)\n\n", data, re.S)
            if match is None:
                continue
            told = json.loads(match[2])
            seen.append((match[1].decode(), told["now"]["phase"], "history" in told))
            if len(seen) == 1:
                engine.is_alive = False
            elif seen[-1][1] == "restarting" and not engine.is_alive:
                engine.is_alive = True
                engine.num_restarts += 1
            elif len(seen) > 2 and seen[-1][1] == "ready":
                return

    await asyncio.wait_for(follow(), PATIENCE_S)
    await stream.aclose()
    assert [phase for _, phase, _ in seen] == ["ready", "restarting", "ready"]
    assert seen[-1][2], "what the dead engine had done must be forgotten"


async def test_g07_a_step_is_explained() -> None:
    """G07"""
    engine = FakeEngine()
    explained = StepExplained(7, [StepRow(3, 0, 16, 16, True)], 1, [("host", "device", 4)], [])

    def snapshot(since_step: int, wants_tree: bool, explain_step: int | None) -> Snapshot:
        stats = nothing_to_see(0, False, None).stats
        found = explained if explain_step == 7 else None
        return Snapshot(1, stats, 0.0, False, 0, [], [], {0: "pirate"}, [], [], explained=found)

    engine.snapshot = snapshot
    harness = Harness(engine)
    told = (await get(harness, "/page/step?id=7")).json()
    assert told == {
        "step": [7, [[3, 0, 16, 16, True]], 1, [["host", "device", 4]], []],
        "names": {"0": "pirate"},
    }
    assert (await get(harness, "/page/step?id=8")).status_code == 404
    assert (await get(harness, "/page/step?id=x")).status_code == 400


async def test_g07_pages_are_limited() -> None:
    """G07: 64 may be open; the next is told to come later."""
    harness = Harness()
    await get(harness, "/page/step?id=1")
    from manyroots.api.page.routes import hub_of

    hub = hub_of(harness.state)
    permits = hub.limit.admit(hub.limit.limit)
    assert (await get(harness, "/page/stream")).status_code == 429
    permits.release()
