"""Keys with adapters and limits of their own, through a real server (A06)."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.adapter_server import ADMIN, AdapterServer, cached, completion, serving
from tests.helpers.patience import PATIENCE_S
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_adapters import TinyAdapters

PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43]
KEYS: list[dict[str, Any]] = [
    {"name": "acme", "key": "key-acme", "adapters": ["all", "acme/*"]},
    {"name": "brew", "key": "key-brew", "adapters": ["few"], "base_model": False},
    {"name": "twin", "key": "key-twin", "adapters": ["all"]},
    {"name": "few-at-once", "key": "key-few", "adapters": ["all"], "max_running": 3},
    {"name": "slow", "key": "key-slow", "adapters": ["all"], "tokens_per_minute": 200},
    {"name": "small", "key": "key-small", "adapters": ["all"], "memory_share": 0.05},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def log(tiny: TinyAdapters) -> Path:
    return tiny.model.parent / "usage.jsonl"


@pytest.fixture(scope="module")
def server(tiny: TinyAdapters, log: Path) -> Iterator[AdapterServer]:
    file = tiny.model.parent / "keys.json"
    file.write_text(json.dumps({"keys": KEYS}))
    modules = [f"{name}={tiny.path(name)}" for name in ("all", "few", "other")]
    flags = {"keys-file": str(file), "usage-log": str(log), "max-cpu-loras": 4}
    env = slow_steps(tiny.model.parent, while_there=tiny.slow)
    with serving(tiny, *modules, env=env, **flags) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(server: AdapterServer, key: str, model: str, count: int = 4, **more: Any) -> httpx.Response:
    body = completion(model, PROMPT, count) | more
    return server.post("/v1/completions", body, bearer(key))


def names(server: AdapterServer, key: str) -> list[str]:
    answer = server.client.get("/v1/models", headers=bearer(key))
    return [model["id"] for model in answer.json()["data"]]


def logged_since(log: Path, before: int, count: int) -> list[dict[str, Any]]:
    """The lines that came since, once there are so many: a thread writes them."""
    deadline = time.monotonic() + PATIENCE_S
    while len(lines := log.read_text().splitlines()[before:]) < count:
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)
    return [json.loads(line) for line in lines]


def test_a06_a_key_sees_and_uses_its_own_adapters_alone(server: AdapterServer) -> None:
    assert names(server, "key-acme") == ["tiny", "all"]
    assert names(server, "key-brew") == ["few"]
    assert ask(server, "key-acme", "all").status_code == 200
    assert ask(server, "key-brew", "few").status_code == 200
    assert ask(server, "nonsense", "all").status_code == 401
    assert ask(server, "key-brew", "tiny").status_code == 404, "it may not use the base alone"
    base = ask(server, "key-brew", "tiny", lora_path="few")
    assert base.status_code == 200, base.text


def test_a06_a_forbidden_name_is_answered_as_an_unknown_one(server: AdapterServer) -> None:
    """In every way of naming it, and in every byte but the name itself."""
    for path, body in (
        ("/v1/completions", completion("NAME", PROMPT, 1)),
        ("/v1/completions", completion("NAME@0123456789ab", PROMPT, 1)),
        ("/v1/completions", completion("tiny:NAME", PROMPT, 1)),
        ("/v1/completions", completion("tiny", PROMPT, 1) | {"lora_path": "NAME"}),
        ("/v1/chat/completions", {"model": "NAME", "messages": []}),
        ("/v1/embeddings", {"model": "NAME", "input": "x"}),
        ("/v1/messages", {"model": "NAME", "max_tokens": 1, "messages": []}),
        ("/tokenize", {"model": "NAME", "prompt": "x"}),
    ):
        said = []
        for name in ("other", "never"):  # as long as each other
            text = json.dumps(body).replace("NAME", name)
            answer = server.post(path, json.loads(text), bearer("key-acme"))
            headers = {k: v for k, v in answer.headers.items() if k not in ("x-request-id", "date")}
            said.append((answer.status_code, answer.text.replace(name, "NAME"), headers))
        assert said[0] == said[1]
        assert said[0][0] in (400, 404), path
    for name in ("other", "never"):
        shown = server.client.get(f"/v1/models/{name}", headers=bearer("key-acme"))
        assert shown.status_code == 404


def test_a06_what_tells_of_others_needs_another_key(server: AdapterServer) -> None:
    for path in ("/metrics", "/v1/page/state", "/pause"):
        for headers in ({}, bearer("key-acme")):
            assert server.client.get(path, headers=headers).status_code in (401, 403, 404, 405)
    text = server.client.get("/metrics", headers=ADMIN).text
    assert "manyroots:adapter_requests_total" in text


def test_a06_one_key_can_not_time_what_another_has_sent(server: AdapterServer) -> None:
    prompt = {"prompt": list(range(60, 100))}
    assert cached(ask(server, "key-acme", "all", **prompt)) == 0
    assert cached(ask(server, "key-acme", "all", **prompt)) > 0
    assert cached(ask(server, "key-twin", "all", **prompt)) == 0


def test_a06_limits_hold_under_200_clients_and_usage_adds_up(
    server: AdapterServer, log: Path
) -> None:
    before = len(log.read_text().splitlines()) if log.exists() else 0

    def one(number: int) -> tuple[str, httpx.Response]:
        name = ("few-at-once", "slow", "small", "acme")[number % 4]
        key = next(item["key"] for item in KEYS if item["name"] == name)
        return name, ask(server, key, "all", count=12, prompt=[number % 250, *PROMPT])

    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(200) as threads:
        answers = list(threads.map(one, range(200)))
    used: Counter[str] = Counter()
    statuses: dict[str, Counter[int]] = {}
    for name, answer in answers:
        statuses.setdefault(name, Counter())[answer.status_code] += 1
        if answer.status_code == 200:
            used[name] += answer.json()["usage"]["total_tokens"]
            continue
        assert answer.status_code == 429, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        busy = "at its limit" in answer.text or "The server is busy" in answer.text
        assert busy, answer.text
    # At most a full bucket, and what flowed into it while the clients were served.
    assert 26 <= used["slow"] <= 200 * (1 + (time.monotonic() - start) / 60)
    assert statuses["slow"][429] > 0
    assert "tokens" in str([a.text for n, a in answers if n == "slow" and a.status_code == 429])
    assert statuses["few-at-once"][200] > 0
    num_good = sum(answer.status_code == 200 for _, answer in answers)
    logged: Counter[str] = Counter()
    changes: list[tuple[float, int]] = []
    for line in logged_since(log, before, num_good):
        logged[line["key"]] += line["prompt_tokens"] + line["completion_tokens"]
        assert line["adapter"] == "all"
        if line["key"] == "few-at-once":
            changes += [(line["time"], 1), (line["time"] + line["seconds"], -1)]
    assert logged == used, "usage is what was streamed"
    running = list(itertools.accumulate(change for _, change in sorted(changes)))
    assert max(running) == 3, "as many at once as the key may have, and no more"
    text = server.client.get("/metrics", headers=ADMIN).text
    found = re.findall(r'manyroots:key_tokens_total{adapter="all",key="slow",kind=.*} (\S+)', text)
    assert sum(map(float, found)) == used["slow"]


def test_a06_a_request_that_can_never_fit_is_told_so(server: AdapterServer) -> None:
    refused = ask(server, "key-slow", "all", count=250)
    assert refused.status_code == 400
    assert "tokens_per_minute allows 200" in refused.json()["error"]["message"]
    refused = ask(server, "key-few", "all", n=4, temperature=1)
    assert refused.status_code == 400
    refused = ask(server, "key-small", "all", count=120)
    assert refused.status_code == 400, refused.text
    assert "memory_share" in refused.json()["error"]["message"]


def test_a06_a_stream_that_is_left_is_counted_as_far_as_it_came(
    server: AdapterServer, tiny: TinyAdapters, log: Path
) -> None:
    before = len(log.read_text().splitlines())
    tiny.slow.touch()  # so that the stream is not over before its client has left
    body = completion("all", PROMPT, 200) | {"stream": True}
    with server.client.stream(
        "POST", "/v1/completions", json=body, headers=bearer("key-twin")
    ) as stream:
        next(line for line in stream.iter_lines() if line.startswith("data"))
    [line] = logged_since(log, before, 1)
    tiny.slow.unlink()
    assert line["finish"] == ["abort"]
    assert 1 <= line["completion_tokens"] < 200
