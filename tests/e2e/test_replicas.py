"""`manyroots serve --replicas 3`: real engines, one address; replicas die and adapters change."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.adapter_server import MODEL, AdapterServer, cached, completion, serving, tokens
from tests.e2e.conftest import HEADERS
from tests.helpers.adapter_folders import Recipe
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_adapters import ATTENTION, TinyAdapters

PROMPT = [(7 * i) % 290 + 5 for i in range(40)]
NUM_REPLICAS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="module")
def served(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    flags: dict[str, Any] = {"replicas": NUM_REPLICAS, "max-engine-restarts": 20}
    with serving(tiny, f"all={tiny.path('all')}", f"few={tiny.path('few')}", **flags) as server:
        yield server


def replicas_up(served: AdapterServer) -> int:
    return int(served.server.metric("manyroots:replicas_up"))


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
    before = steps_by_replica(served)
    prompts = [[(i * j) % 290 + 5 for j in range(30)] for i in range(2, 26)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: served.complete(MODEL, prompt, 16), prompts))
    assert all(answer.status_code == 200 for answer in answers)
    after = steps_by_replica(served)
    assert all(after[number] > before.get(number, 0) for number in after), (before, after)


def steps_by_replica(served: AdapterServer) -> dict[str, float]:
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


def test_m03_requests_of_a_killed_replica_are_answered_or_end_with_a_clear_error(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    """Each answer is complete and right. A stream that had begun says why it ends."""
    expected = {name: tiny.greedy(PROMPT, name, 40) for name in (None, "all")}
    wrong: list[str] = []
    counts = {"whole": 0, "cut": 0, "refused": 0}
    stop = threading.Event()

    def ask(number: int) -> None:
        adapter = (None, "all")[number % 2]
        body = completion(adapter or MODEL, PROMPT, 40) | {"stream": True}
        while not stop.is_set():
            got: list[int] = []
            error, status = None, 0
            with served.client.stream(
                "POST", "/v1/completions", json=body, headers=HEADERS
            ) as reply:
                status = reply.status_code
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            error = event["error"]["message"]
                        else:
                            got += event["choices"][0].get("token_ids") or []
            if status != 200:
                counts["refused"] += 1
                wrong.append(f"status {status}")
            elif error is not None:
                counts["cut"] += 1
                if not got or "killed by SIGKILL" not in error:
                    wrong.append(f"{len(got)} tokens, then {error}")
            else:
                counts["whole"] += 1
                if got != expected[adapter]:
                    wrong.append(f"{got}")

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(ask, number) for number in range(8)]
        try:
            for _ in range(2):
                served.server.wait_for("manyroots:replicas_up", lambda up: up == NUM_REPLICAS)
                wait_for_more(counts, 8)
                os.kill(served.server.children()[0], signal.SIGKILL)
                served.server.wait_for("manyroots:replicas_up", lambda up: up < NUM_REPLICAS)
                wait_for_more(counts, 8)
        finally:
            stop.set()
        for each in work:
            each.result(PATIENCE_S)
    assert not wrong, (wrong, counts)
    served.server.wait_for("manyroots:replicas_up", lambda value: value == NUM_REPLICAS)
    assert tokens(served.complete("all", PROMPT, 40)) == expected["all"]


def wait_for_more(counts: dict[str, int], number: int) -> None:
    """Until so many more requests have been answered whole."""
    goal, deadline = counts["whole"] + number, time.monotonic() + PATIENCE_S
    while counts["whole"] < goal:
        assert time.monotonic() < deadline, counts
        time.sleep(0.02)


def test_m03_m04_a_replica_that_was_down_during_a_load_has_it_when_it_serves(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    os.kill(served.server.children()[0], signal.SIGKILL)
    served.server.wait_for("manyroots:replicas_up", lambda value: value < NUM_REPLICAS)
    assert served.load("later", tiny.path("stable")).status_code == 200
    served.server.wait_for("manyroots:replicas_up", lambda value: value == NUM_REPLICAS)
    expected = tiny.greedy(PROMPT, "stable", 8)
    prompts = [PROMPT] * 12
    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda prompt: tokens(served.complete("later", prompt)), prompts))
    assert got == [expected] * 12
    assert served.unload("later").status_code == 200


def test_m01_the_server_says_how_its_replicas_are(served: AdapterServer) -> None:
    answer = httpx.get(
        served.server.url + "/v1/replicas",
        headers={"authorization": "Bearer the-admin"},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 200, answer.text
    replicas = answer.json()["data"]
    assert [replica["number"] for replica in replicas] == [0, 1, 2]
    assert sorted(replica["pid"] for replica in replicas) == sorted(served.server.children())
    assert all(replica["is_up"] for replica in replicas)
