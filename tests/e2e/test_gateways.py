"""`manyroots serve --gateways 2 --replicas 2`: they share limits, adapters and engines.

Each test begins with a server whose gateways and engines are all there, whatever tests before it
have killed or ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.adapter_server import ADMIN, MODEL, PAGE_SIZE, completion, tokens
from tests.e2e.conftest import Server, children_of, command_of, running
from tests.helpers.adapter_folders import Recipe
from tests.helpers.patience import PATIENCE_S
from tests.helpers.replica_load import Asked, StreamLoad
from tests.helpers.tiny_adapters import ATTENTION, TinyAdapters

PROMPT = [(7 * i) % 290 + 5 for i in range(40)]
NUM_GATEWAYS = 2
NUM_REPLICAS = 2
KEY, LIMITED = "for-all", "for-few"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("gateways"))


class Gateways:
    """A server with several, and a client for each."""

    def __init__(self, server: Server) -> None:
        self.server = server
        deadline = time.monotonic() + PATIENCE_S
        pattern = r"gateway (\d+) is listening on \S+:(\d+)"
        while len(ports := dict(re.findall(pattern, server.log()))) < NUM_GATEWAYS:
            assert server.process.poll() is None, server.log()
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.05)
        self.urls = [f"http://127.0.0.1:{ports[number]}" for number in sorted(ports)]
        self.clients = [httpx.Client(base_url=url, timeout=PATIENCE_S) for url in self.urls]
        for client in self.clients:
            self.wait_until_ready(client)

    def wait_until_ready(self, client: httpx.Client) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if client.get("/ready").status_code == 200:
                    return
            assert self.server.process.poll() is None, self.server.log()
            assert time.monotonic() < deadline, self.server.log()
            time.sleep(0.05)

    def wait_until_whole(self) -> None:
        """Until what was killed is back."""
        deadline = time.monotonic() + PATIENCE_S
        while (len(self.engines()), len(self.pids())) != (NUM_REPLICAS, NUM_GATEWAYS):
            assert time.monotonic() < deadline, self.server.log()
            time.sleep(0.05)
        for client in self.clients:
            self.wait_until_ready(client)

    def kill_gateway(self, pid: int) -> None:
        """It has closed its connections when this returns."""
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while pid in self.pids():
            assert time.monotonic() < deadline, self.server.log()
            time.sleep(0.01)

    def keep(self, tiny: TinyAdapters) -> None:
        """Load an adapter while the server runs."""
        loaded = self.admin(
            0, "/v1/load_lora_adapter", lora_name="kept", lora_path=tiny.path("stable"),
            load_inplace=True,
        )  # fmt: skip
        assert loaded.is_success, loaded.text

    def complete(self, number: int, model: str, count: int = 8, **more: Any) -> httpx.Response:
        return self.clients[number].post(
            "/v1/completions", json=completion(model, PROMPT, count), headers=HEADERS | more
        )

    def admin(self, number: int, path: str, **body: Any) -> httpx.Response:
        return self.clients[number].post(path, json=body, headers=ADMIN)

    def engines(self) -> list[int]:
        """Pids of the engines, which the router has started."""
        found = []
        for pid in children_of(self.server.process.pid):
            found += [each for each in children_of(pid) if "engine.process" in command_of(each)]
        return sorted(found)

    def pids(self) -> list[int]:
        """Of the gateways, in the order of their numbers."""
        return [pid for _, pid in sorted(self._called("mr-gateway-"))]

    def router(self) -> int:
        [(_, pid)] = self._called("mr-router")
        return pid

    def _called(self, begin: str) -> list[tuple[str, int]]:
        found = []
        for pid in children_of(self.server.process.pid):
            with contextlib.suppress(OSError):  # it has just ended
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith(begin):
                    found.append((name, pid))
        return found


class Started:
    """At most one server, which is started again if it has ended."""

    def __init__(self, tiny: TinyAdapters) -> None:
        self._tiny = tiny
        self._open = contextlib.ExitStack()
        self._gateways: Gateways | None = None

    def served(self) -> Gateways:
        if self._gateways is None or self._gateways.server.process.poll() is not None:
            self.close()
            self._gateways = self._open.enter_context(serving(self._tiny))
        self._gateways.wait_until_whole()
        return self._gateways

    def close(self) -> None:
        self._open.close()


@pytest.fixture(scope="module")
def started(tiny: TinyAdapters) -> Iterator[Started]:
    started = Started(tiny)
    yield started
    started.close()


@pytest.fixture
def served(started: Started) -> Gateways:
    return started.served()


@contextlib.contextmanager
def serving(tiny: TinyAdapters) -> Iterator[Gateways]:
    keys = tiny.model.parent / "keys.json"
    keys.write_text(json.dumps({"keys": [
        {"name": "all", "key": KEY, "adapters": ["*"]},
        {"name": "few", "key": LIMITED, "adapters": ["*"], "max_running": 2},
    ]}))  # fmt: skip
    with running(
        str(tiny.model), "--served-model-name", MODEL, "--keys-file", str(keys),
        "--block-size", str(PAGE_SIZE), "--max-num-seqs", "40", "--num-gpu-blocks-override", "512",
        "--gateways", str(NUM_GATEWAYS), "--replicas", str(NUM_REPLICAS),
        "--max-engine-restarts", "20", "--max-api-restarts", "20",
        "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "64",
        "--enable-lora-endpoints", "--admin-key", "the-admin", "--lora-dirs", str(tiny.dirs),
        "--lora-modules", f"all={tiny.path('all')}",
    ) as server:  # fmt: skip
        yield Gateways(server)


def test_m04_after_a_load_at_one_gateway_every_gateway_uses_that_revision(
    served: Gateways, tiny: TinyAdapters
) -> None:
    for number in range(NUM_GATEWAYS):
        assert tokens(served.complete(number, "all")) == tiny.greedy(PROMPT, "all", 8)
    assert served.complete(1, "new").status_code == 404
    for seed in (31, 32):
        path = tiny.write(f"new-{seed}", Recipe(rank=8, modules=ATTENTION, seed=seed))
        loaded = served.admin(
            seed % 2, "/v1/load_lora_adapter", lora_name="new", lora_path=str(path),
            load_inplace=True,
        )  # fmt: skip
        assert loaded.status_code == 200, loaded.text
        expected = tiny.greedy(PROMPT, f"new-{seed}", 8)
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda i: tokens(served.complete(i % 2, "new")), range(8)))
        assert got == [expected] * 8
    listed = [client.get("/v1/models", headers=HEADERS).json() for client in served.clients]
    assert ["new" in [model["id"] for model in each["data"]] for each in listed] == [True, True]
    missing = served.admin(0, "/v1/load_lora_adapter", lora_name="no", lora_path="/nowhere")
    assert missing.status_code == 400
    assert served.admin(0, "/v1/unload_lora_adapter", lora_name="new").status_code == 200
    assert [served.complete(i, "new").status_code for i in range(NUM_GATEWAYS)] == [404, 404]
    assert served.admin(1, "/v1/unload_lora_adapter", lora_name="new").status_code == 404


def test_m04_limits_of_a_key_hold_across_gateways(served: Gateways) -> None:
    """Two requests at one gateway are all that the key may have, at the other one too. They wait
    meanwhile, because the engines are paused."""
    limited = {"authorization": f"Bearer {LIMITED}"}

    def wait_for_running(count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while served.clients[1].get("/load", headers=limited).json()["server_load"] != count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with ThreadPoolExecutor(2) as pool:
        assert served.admin(0, "/pause?mode=keep").is_success
        try:
            running = [pool.submit(served.complete, 0, MODEL, **limited) for _ in range(2)]
            wait_for_running(2)
            refused = [served.complete(number, MODEL, **limited) for number in range(NUM_GATEWAYS)]
            assert [answer.status_code for answer in refused] == [429, 429]
            assert "2 are allowed" in refused[1].text
            assert served.complete(1, "nothing").status_code == 404  # other keys are not refused
        finally:
            assert served.admin(1, "/resume").is_success
        assert [answer.result(PATIENCE_S).status_code for answer in running] == [200, 200]
    wait_for_running(0)
    assert served.complete(1, MODEL, **limited).status_code == 200


def test_m03_a_gateway_may_die_and_engines_and_other_gateways_go_on(
    served: Gateways, tiny: TinyAdapters
) -> None:
    """What was loaded is known to the next gateway, and what it held of a key's limits is free."""
    served.keep(tiny)
    engines, gateways = served.engines(), served.pids()
    expected = tiny.greedy(PROMPT, "stable", 30)
    asked = [Asked(completion("kept", PROMPT, 30), expected)]
    errors = ["killed by SIGKILL"]
    with (
        StreamLoad(served.urls[0], HEADERS, asked, num_callers=2, may_break=True) as first,
        StreamLoad(served.urls[1], HEADERS, asked, num_callers=2, may_break=True) as second,
    ):
        for load in (first, second):
            load.wait_for_more(2)
        os.kill(gateways[0], signal.SIGKILL)
        for load in (first, second):
            load.wait_for_more(3)
    assert not first.wrong + second.wrong, (first.wrong, second.wrong)
    # One of them lost a gateway; the other's connections stayed.
    assert (
        sorted(bool(load.counts["cut"] + load.counts["asked again"]) for load in (first, second))[0]
        is False
    )
    assert served.engines() == engines
    # An engine's death is seen by neither, unless a stream had begun.
    with StreamLoad(served.urls[1], HEADERS, asked, num_callers=3, errors=errors) as load:
        load.wait_for_more(2)
        os.kill(engines[0], signal.SIGKILL)
        load.wait_for_more(3)
    assert not load.wrong, load.wrong


def test_m01_m03_all_replicas_restart_one_by_one_through_any_gateway(
    served: Gateways, tiny: TinyAdapters
) -> None:
    served.keep(tiny)
    before = served.engines()
    answer = served.admin(1, "/v1/replicas/restart")
    assert answer.status_code == 200, answer.text
    deadline = time.monotonic() + PATIENCE_S
    while len(served.engines()) != NUM_REPLICAS:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not set(before) & set(served.engines())
    for number in range(NUM_GATEWAYS):
        assert tokens(served.complete(number, "kept")) == tiny.greedy(PROMPT, "stable", 8)
        views = served.clients[number].get("/v1/replicas", headers=ADMIN).json()["data"]
        assert sorted(view["pid"] for view in views) == served.engines()


def test_m03_the_router_may_die_and_requests_without_output_wait_for_the_next(
    served: Gateways, tiny: TinyAdapters
) -> None:
    """No caller is refused: neither requests that come while there is no router, nor those of a
    gateway that has just been started."""
    served.keep(tiny)
    expected = tiny.greedy(PROMPT, "stable", 8)
    gateway, router = served.pids()[0], served.router()
    os.kill(router, signal.SIGKILL)
    for _ in range(500):
        if served.clients[1].get("/ready").status_code != 200:
            break
        time.sleep(0.01)  # it has not noticed yet
    served.kill_gateway(gateway)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(served.complete, 1, "kept") for _ in range(4)]
        assert [tokens(answer.result(PATIENCE_S)) for answer in answers] == [expected] * 4
    for number, client in enumerate(served.clients):
        served.wait_until_ready(client)
        assert tokens(served.complete(number, "kept")) == expected


def test_m01_all_processes_end_when_told(served: Gateways) -> None:
    mine = [*served.engines(), *children_of(served.server.process.pid)]
    served.server.signal(signal.SIGTERM)
    assert served.server.process.wait(PATIENCE_S) == 0, served.server.log()
    assert not [pid for pid in mine if Path(f"/proc/{pid}").exists()]
