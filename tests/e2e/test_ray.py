"""Replicas in actors of a real Ray on this machine: they serve, die, come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.adapter_server import (
    ADMIN,
    MODEL,
    AdapterServer,
    completion,
    serving,
    tokens,
)
from tests.e2e.conftest import HEADERS, command_of
from tests.helpers.patience import PATIENCE_S
from tests.helpers.replica_load import Asked, StreamLoad
from tests.helpers.tiny_adapters import TinyAdapters

pytest.importorskip("ray")

PROMPT = [(11 * i) % 290 + 5 for i in range(24)]
MAX_REPLICAS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def served(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    flags: dict[str, Any] = {
        "replicas": 1, "max-replicas": MAX_REPLICAS, "replica-backend": "ray", "device": "cpu",
        "target-ongoing-requests": 2, "upscale-delay-s": 0.2, "downscale-delay-s": 1.0,
        "max-engine-restarts": 5,
    }  # fmt: skip
    with serving(tiny, f"all={tiny.path('all')}", env=None, **flags) as server:
        yield server


def engines() -> list[int]:
    """Engine processes that connect to a gateway over TCP, of this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = command_of(int(folder.name))
        except OSError:
            continue
        if "manyroots.engine.process tcp://" in command:
            found.append(int(folder.name))
    return found


def pids(served: AdapterServer) -> list[int]:
    answer = served.client.get("/v1/replicas", headers=ADMIN)
    return [replica["pid"] for replica in answer.json()["data"]]


def test_m01_g08_actors_of_a_real_ray_serve_with_adapters(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    assert set(pids(served)) <= set(engines())
    for adapter in (None, "all"):
        expected = tiny.greedy(PROMPT, adapter, 8)
        assert tokens(served.complete(adapter or MODEL, PROMPT)) == expected
    assert served.load("few", tiny.path("few")).status_code == 200
    assert tokens(served.complete("few", PROMPT)) == tiny.greedy(PROMPT, "few", 8)


@pytest.mark.nightly
def test_m01_m03_g08_autoscaling_on_ray_goes_to_three_and_back_through_a_kill(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    """Under load there are three. One of them is killed: Ray starts it again, and each answer is
    right. Without load, one is left."""
    asked = [
        Asked(completion(adapter or MODEL, PROMPT, 24), tiny.greedy(PROMPT, adapter, 24))
        for adapter in (None, "all", "few")
    ]
    wait_for = served.server.wait_for
    load = StreamLoad(
        served.server.url, HEADERS, asked, num_callers=6, errors=["killed by SIGKILL"]
    )
    with load:
        wait_for("manyroots:replicas_up", lambda up: up == MAX_REPLICAS)
        before = pids(served)
        os.kill(before[0], signal.SIGKILL)
        wait_for("manyroots:replicas_up", lambda up: up < MAX_REPLICAS)
        load.wait_for_more(3)
        wait_for("manyroots:replicas_up", lambda up: up == MAX_REPLICAS)
        after = pids(served)
    assert not load.wrong, (load.wrong, load.counts)
    assert after[0] != before[0]
    assert after[1:] == before[1:]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda _: tokens(served.complete("few", PROMPT)), range(6)))
    assert got == [tiny.greedy(PROMPT, "few", 8)] * 6
    wait_for("manyroots:replicas", lambda number: number == 1)


def test_m01_the_server_drains_and_leaves_no_engine(served: AdapterServer) -> None:
    mine = pids(served)
    served.server.signal(signal.SIGTERM)
    assert served.server.process.wait(PATIENCE_S) == 0, served.server.log()
    deadline = time.monotonic() + PATIENCE_S
    while set(mine) & set(engines()):  # one that was too slow to end by itself ends with its actor
        assert time.monotonic() < deadline, served.server.log()
        time.sleep(0.05)


APPLICATION = """
import contextlib, os, sys, time
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import httpx, ray
from ray import serve
from manyroots.ray import app
from manyroots.ray.replicas import start_own_ray

model, patience_s = sys.argv[1], float(sys.argv[2])
start_own_ray(4)
serve.start(proxy_location="Disabled")
handle = serve.run(app({
    "model": model, "replicas": "1", "port": 0, "device": "cpu", "served-model-name": "tiny",
}))
gateway = handle.address.remote().result(timeout_s=patience_s)
client = httpx.Client(base_url=gateway, timeout=patience_s)
deadline, is_ready = time.monotonic() + patience_s, False
while not is_ready:
    assert time.monotonic() < deadline
    time.sleep(0.2)
    with contextlib.suppress(httpx.TransportError):
        is_ready = client.get("/ready").status_code == 200
asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
answer = client.post("/v1/completions", json=asked)
assert answer.status_code == 200, answer.text
assert answer.json()["usage"]["completion_tokens"] == 3
assert 'manyroots:replicas_up{model_name="tiny"} 1.0' in client.get("/metrics").text
serve.shutdown()
ray.shutdown()
print("served")
"""


def test_m01_g08_a_serve_application_is_a_gateway_with_its_engines(tiny: TinyAdapters) -> None:
    """In a process of its own, because Ray changes signal handlers and the environment."""
    command = [sys.executable, "-c", APPLICATION, str(tiny.model), str(PATIENCE_S)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout
