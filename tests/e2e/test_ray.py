"""Replicas in actors of a real Ray on this machine: they serve, die and come back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.adapter_server import MODEL, AdapterServer, serving, tokens
from tests.e2e.conftest import command_of
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_adapters import TinyAdapters

pytest.importorskip("ray")

PROMPT = [(11 * i) % 290 + 5 for i in range(24)]
NUM_REPLICAS = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def served(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    flags: dict[str, Any] = {"replicas": NUM_REPLICAS, "replica-backend": "ray", "device": "cpu"}
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
    answer = served.client.get("/v1/replicas", headers={"authorization": "Bearer the-admin"})
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


def test_m01_m03_g08_ray_starts_a_killed_engine_again_and_it_has_its_adapters(
    served: AdapterServer, tiny: TinyAdapters
) -> None:
    before = pids(served)
    os.kill(before[0], signal.SIGKILL)
    served.server.wait_for("manyroots:replicas_up", lambda up: up == NUM_REPLICAS - 1)
    assert tokens(served.complete("few", PROMPT)) == tiny.greedy(PROMPT, "few", 8)
    served.server.wait_for("manyroots:replicas_up", lambda up: up == NUM_REPLICAS)
    after = pids(served)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert tokens(served.complete("few", PROMPT)) == tiny.greedy(PROMPT, "few", 8)


def test_m01_the_server_drains_and_leaves_no_engine(served: AdapterServer) -> None:
    mine = pids(served)
    served.server.signal(signal.SIGTERM)
    assert served.server.process.wait(PATIENCE_S) == 0, served.server.log()
    assert not set(mine) & set(engines())


APPLICATION = """
import os, sys, time
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import httpx, ray
from ray import serve
from manyroots.ray import app

model, proxy, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ray.init(include_dashboard=False, num_cpus=4, logging_level="WARNING", log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": proxy})
serve.run(app({
    "model": model, "replicas": "2", "port": port, "device": "cpu", "served-model-name": "tiny",
}))
gateway = httpx.get(f"http://127.0.0.1:{proxy}/", timeout=60).json()["gateway"]
deadline = time.monotonic() + 240
while httpx.get(gateway + "/ready").status_code != 200:
    assert time.monotonic() < deadline
    time.sleep(0.2)
asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
answer = httpx.post(gateway + "/v1/completions", json=asked, timeout=60)
assert answer.status_code == 200, answer.text
assert answer.json()["usage"]["completion_tokens"] == 3
assert 'manyroots:replicas_up{model_name="tiny"} 2.0' in httpx.get(gateway + "/metrics").text
serve.shutdown()
ray.shutdown()
print("served")
"""


def test_m01_g08_a_serve_application_is_a_gateway_with_its_engines(tiny: TinyAdapters) -> None:
    """In a process of its own, because Ray changes signal handlers and the environment."""
    ports = []
    for _ in range(2):
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            ports.append(str(chosen.getsockname()[1]))
    command = [sys.executable, "-c", APPLICATION, str(tiny.model), *ports]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout
