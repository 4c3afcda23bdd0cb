"""`manyroots serve --replicas 3`: real engines, one address; replicas die and adapters change."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.adapter_server import (
    ADMIN,
    MODEL,
    AdapterServer,
    cached,
    completion,
    serving,
    tokens,
)
from tests.e2e.conftest import HEADERS
from tests.helpers.adapter_folders import Recipe
from tests.helpers.chromium import chromium, find_chromium
from tests.helpers.page_server import open_page
from tests.helpers.patience import PATIENCE_S
from tests.helpers.replica_load import Asked, StreamLoad
from tests.helpers.tiny_adapters import ATTENTION, TinyAdapters

PROMPT = [(7 * i) % 290 + 5 for i in range(40)]
NUM_REPLICAS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="module")
def served(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    flags: dict[str, Any] = {
        "replicas": NUM_REPLICAS,
        "max-engine-restarts": 20,
        "replica-silence-s": 4,
    }
    with serving(tiny, f"all={tiny.path('all')}", f"few={tiny.path('few')}", **flags) as server:
        yield server


def replicas(served: AdapterServer) -> list[dict[str, Any]]:
    answer = served.client.get("/v1/replicas", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    listed: list[dict[str, Any]] = answer.json()["data"]
    return listed


def drained(served: AdapterServer) -> list[int]:
    return [replica["number"] for replica in replicas(served) if replica["is_drained"]]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_m01_m02_replicas_answer_as_one_engine_and_reuse_what_one_of_them_has(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    assert len(served.server.children()) == NUM_REPLICAS
    for adapter in (None, "all", "few"):
        expected = tiny.greedy(PROMPT, adapter, 8)
        first = served.complete(adapter or MODEL, PROMPT)
        assert (tokens(first), cached(first)) == (expected, 0)
        again = [served.complete(adapter or MODEL, PROMPT) for _ in range(4)]
        assert [tokens(answer) for answer in again] == [expected] * 4
        # All but the last token's page, each time: the same replica was chosen.
        assert [cached(answer) for answer in again] == [36] * 4
    salted = served.complete(MODEL, PROMPT, cache_salt="another")
    assert cached(salted) == 0
    assert served.server.metric("manyroots:replicas") == NUM_REPLICAS


def test_m01_load_is_spread_over_all_replicas(served: AdapterServer) -> None:
    """Requests that come at once: in a pause none is over before the last one is here."""
    before = requests_by_replica(served)
    prompts = [[(i * j) % 290 + 5 for j in range(30)] for i in range(2, 26)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert served.post("/pause?mode=keep", {}, ADMIN).is_success
        try:
            answers = [pool.submit(served.complete, MODEL, prompt, 16) for prompt in prompts]
            wait_until(lambda: served.server.get("/load").json()["server_load"] == len(prompts))
        finally:
            assert served.post("/resume", {}, ADMIN).is_success
        assert all(answer.result(PATIENCE_S).status_code == 200 for answer in answers)
    after = requests_by_replica(served)
    assert all(after[number] > before.get(number, 0) for number in after), (before, after)


def requests_by_replica(served: AdapterServer) -> dict[str, float]:
    found = {}
    for line in served.server.get("/metrics").text.splitlines():
        if line.startswith("manyroots:replica_requests_total{"):
            found[line.split('replica="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    assert len(found) == NUM_REPLICAS
    return found


def test_m04_a_load_and_a_replacement_reach_all_replicas_before_they_return(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    assert served.load("new", tiny.path("other")).status_code == 200
    for seed in (21, 22):
        with ThreadPoolExecutor(12) as pool:
            prompts = [[*PROMPT, 5 + i] for i in range(12)]
            answers = list(pool.map(lambda prompt: served.complete("new", prompt), prompts))
        assert len({answer.json()["choices"][0]["adapter_revision"] for answer in answers}) == 1
        path = tiny.write(f"new-{seed}", Recipe(rank=8, modules=ATTENTION, seed=seed))
        assert served.load("new", str(path), load_inplace=True).status_code == 200
        expected = tiny.greedy(PROMPT, f"new-{seed}", 8)
        with ThreadPoolExecutor(12) as pool:
            got = list(pool.map(lambda _: tokens(served.complete("new", PROMPT)), range(12)))
        assert got == [expected] * 12
    assert served.unload("new").status_code == 200
    assert served.complete("new", PROMPT).status_code == 404
    assert served.unload("new").status_code == 404


def test_m04_an_adapter_that_one_replica_cannot_load_is_loaded_on_none(
    served: AdapterServer, tiny: TinyAdapters, tmp_path: Path
) -> None:
    answer = served.load("broken", str(tiny.dirs / "missing"))
    assert answer.status_code == 400
    assert served.complete("broken", PROMPT).status_code == 404
    assert "broken" not in served.names()


def loaded(served: AdapterServer, tiny: TinyAdapters, **more: Any) -> StreamLoad:
    """Streams of the base model and of an adapter."""
    asked = [
        Asked(completion(adapter or MODEL, PROMPT, 40), tiny.greedy(PROMPT, adapter, 40))
        for adapter in (None, "all")
    ]
    return StreamLoad(served.server.url, HEADERS, asked, **more)


def test_m03_m04_requests_of_a_killed_replica_are_answered_or_end_with_a_clear_error(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    """Each answer is complete and right. A stream that had begun says why it ends. A replica that
    was down during a load has the adapter when it serves again."""
    with loaded(served, tiny, errors=["killed by SIGKILL"], pause_s=0.2) as load:
        load.wait_for_more(8)
        os.kill(served.server.children()[0], signal.SIGKILL)
        served.server.wait_for("manyroots:replicas_up", lambda up: up < NUM_REPLICAS)
        assert served.load("later", tiny.path("stable")).status_code == 200
        load.wait_for_more(8)
        served.server.wait_for("manyroots:replicas_up", lambda up: up == NUM_REPLICAS)
    assert not load.wrong, (load.wrong, load.counts)
    expected = tiny.greedy(PROMPT, "stable", 8)
    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda _: tokens(served.complete("later", PROMPT)), range(12)))
    assert got == [expected] * 12


@pytest.mark.nightly
def test_m01_m03_a_rolling_restart_renews_all_engines_and_fails_no_request(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    served.server.wait_for("manyroots:replicas_up", lambda up: up == NUM_REPLICAS)
    assert served.load("kept", tiny.path("stable")).status_code == 200
    before = served.server.children()
    with loaded(served, tiny, num_callers=3, pause_s=0.5) as load:
        load.wait_for_more(3)
        answer = served.post("/v1/replicas/restart", {}, ADMIN)
        assert answer.status_code == 200, answer.text
        assert answer.json()["message"] == f"{NUM_REPLICAS} replicas restarted"
        load.wait_for_more(4)
    assert not load.wrong, (load.wrong, load.counts)
    assert not load.counts["cut"]
    after = served.server.children()
    assert len(after) == NUM_REPLICAS
    assert not set(before) & set(after)
    # What was loaded while the server ran is on all new engines.
    with ThreadPoolExecutor(12) as pool:
        prompts = [[*PROMPT, 5 + i] for i in range(12)]
        answers = list(pool.map(lambda prompt: served.complete("kept", prompt), prompts))
    assert [answer.status_code for answer in answers] == [200] * 12
    assert served.unload("kept").status_code == 200


def test_m03_a_replica_that_says_nothing_is_drained_until_it_answers(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    """A request without output is answered by another replica. A stream that had begun goes on
    when its replica does."""
    served.server.wait_for("manyroots:replicas_up", lambda up: up == NUM_REPLICAS)
    prompt = [*PROMPT, 17, 18, 19]
    given = requests_by_replica(served)
    expected = tiny.greedy(prompt, None, 60)
    assert tokens(served.complete(MODEL, prompt, 60)) == expected
    [number] = [n for n, count in requests_by_replica(served).items() if count > given[n]]
    pid = next(r["pid"] for r in replicas(served) if str(r["number"]) == number)
    stream = served.stream(completion(MODEL, prompt, 60))
    got = next(stream)["choices"][0]["token_ids"]
    try:
        os.kill(pid, signal.SIGSTOP)
        # The replica that has the prompt is chosen, and does not answer.
        assert tokens(served.complete(MODEL, prompt, 60)) == expected
        wait_until(lambda: drained(served) == [int(number)])
    finally:
        os.kill(pid, signal.SIGCONT)
    for event in stream:
        got += event["choices"][0].get("token_ids") or []
    assert got == expected
    served.server.wait_for("manyroots:replicas_drained", lambda value: value == 0)
    assert tokens(served.complete(MODEL, prompt, 60)) == expected


def test_m01_the_server_says_how_its_replicas_are(served: AdapterServer) -> None:
    served.server.wait_for("manyroots:replicas_up", lambda up: up == NUM_REPLICAS)
    listed = replicas(served)
    assert [replica["number"] for replica in listed] == [*range(NUM_REPLICAS)]
    assert sorted(replica["pid"] for replica in listed) == sorted(served.server.children())
    assert all(replica["is_up"] for replica in listed)


def test_m01_g07_the_page_shows_all_replicas(served: AdapterServer) -> None:
    if find_chromium() is None:
        pytest.skip("there is no Chromium and none can be installed: the page was NOT tried")
    with chromium() as browser:
        tab = open_page(browser, served)
        rows = "[...document.querySelectorAll('#view [aria-label=Replicas] tbody tr')]"
        tab.until(f"{rows}.length === {NUM_REPLICAS}")
        tab.until(f"{rows}.every((row) => row.innerText.includes('up'))")
        tab.close()


def test_m01_g08_replicas_are_added_for_a_queue_and_for_adapters_and_removed_again(
    tiny: TinyAdapters,
) -> None:
    flags: dict[str, Any] = {
        "replicas": 1, "max-replicas": 3, "target-ongoing-requests": 3, "upscale-delay-s": 0.2,
        "downscale-delay-s": 1.0,
    }  # fmt: skip
    modules = [f"{name}={tiny.path(name)}" for name in ("all", "few", "stable")]
    with serving(tiny, *modules, **flags) as served:
        assert [replica["number"] for replica in replicas(served)] == [0]
        assert served.load("later", tiny.path("other")).status_code == 200
        with loaded(served, tiny, num_callers=8) as load:
            served.server.wait_for("manyroots:replicas_up", lambda up: up == 3)
            load.wait_for_more(8)
        assert not load.wrong, (load.wrong, load.counts)
        # Those that joined have what was loaded before.
        expected = tiny.greedy(PROMPT, "other", 8)
        with ThreadPoolExecutor(12) as pool:
            got = list(pool.map(lambda _: tokens(served.complete("later", PROMPT)), range(12)))
        assert got == [expected] * 12
        served.server.wait_for("manyroots:replicas", lambda number: number == 1)
        wait_until(lambda: len(served.server.children()) == 1)
        # Three adapters at once do not fit into two slots: one replica more.
        asked = [
            Asked(completion(name, PROMPT, 40), tiny.greedy(PROMPT, name, 40))
            for name in ("all", "few", "stable")
        ]
        with StreamLoad(served.server.url, HEADERS, asked, num_callers=3) as load:
            served.server.wait_for("manyroots:replicas_up", lambda up: up == 2)
            load.wait_for_more(6)
        assert not load.wrong, (load.wrong, load.counts)
