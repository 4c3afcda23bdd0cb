"""Adapters through a real server: named, loaded, unloaded and refused while others stream."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import API_KEY, HEADERS, Server, running
from tests.helpers.adapter_folders import WEIGHTS, rewrite_config, rewrite_header, rewrite_weights
from tests.helpers.patience import PATIENCE_S
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_adapters import RECIPES, TinyAdapters

ADMIN = {"authorization": "Bearer the-admin"}
COUNT = 12
PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43, 44, 45, 46, 47]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


def flags(tiny: TinyAdapters) -> list[str]:
    return [
        str(tiny.model), "--served-model-name", "tiny", "--api-key", API_KEY,
        "--num-gpu-blocks-override", "512", "--block-size", "4", "--max-num-seqs", "40",
        "--enable-lora", "--max-loras", "2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def started(tiny: TinyAdapters) -> Iterator[tuple[Server, float]]:
    """A server of two adapters, and the processor time of its start."""
    with running(
        *flags(tiny), "--lora-modules", f"all={tiny.path('all')}", f"few={tiny.path('few')}",
        "--enable-lora-endpoints", "--admin-key", "the-admin", "--lora-dirs", str(tiny.dirs),
        env=slow_steps(tiny.model.parent, while_there=tiny.slow),
    ) as server:  # fmt: skip
        server.wait_until_ready()
        yield server, server.cpu_seconds()


@pytest.fixture(scope="module")
def server(started: tuple[Server, float]) -> Server:
    return started[0]


def post(server: Server, path: str, body: Any, headers: dict[str, str] = HEADERS) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE_S)


def complete(server: Server, **fields: Any) -> httpx.Response:
    body = {
        "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    return post(server, "/v1/completions", body | fields)


def tokens(answer: httpx.Response) -> list[list[int]]:
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def load(server: Server, name: str, path: str, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path} | more
    return post(server, "/v1/load_lora_adapter", body, ADMIN)


def unload(server: Server, name: str) -> httpx.Response:
    return post(server, "/v1/unload_lora_adapter", {"lora_name": name}, ADMIN)


def names(server: Server) -> list[str]:
    return [model["id"] for model in server.get("/v1/models").json()["data"]]


def test_s02_every_way_to_name_an_adapter_computes_with_it(
    server: Server, tiny: TinyAdapters
) -> None:
    """S02, N19: tokens equal PEFT's."""
    wanted = tiny.greedy(PROMPT, "all", COUNT)
    for fields in (
        {"model": "all"}, {"model": "tiny:all"}, {"model": "tiny", "lora_path": "all"},
    ):  # fmt: skip
        assert tokens(complete(server, **fields)) == [wanted]
    assert tokens(complete(server, model="tiny")) == [tiny.greedy(PROMPT, None, COUNT)]
    assert complete(server, model="nobody").status_code == 404


def test_s02_a_batch_mixes_adapters_and_base(server: Server, tiny: TinyAdapters) -> None:
    """S02, W17"""
    paths = ["few", None, "all", "few"]
    answer = complete(server, model="tiny", prompt=[PROMPT] * 4, lora_path=paths)
    assert tokens(answer) == [tiny.greedy(PROMPT, name, COUNT) for name in paths]


def test_n21_a_salt_separates_tenants_within_an_adapter(server: Server) -> None:
    """N21"""

    def cached(salt: str) -> int:
        usage = complete(server, model="few", cache_salt=salt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("tenant a") == 0
    assert cached("tenant a") > 0
    assert cached("tenant b") == 0


def test_n20_a_name_loaded_again_never_answers_from_old_pages(
    server: Server, tiny: TinyAdapters
) -> None:
    """N20, S03: load, unload, load other content under the same name, and in place."""
    for name, more in (("stable", {}), ("other", {}), ("all", {"load_inplace": True})):
        answer = load(server, "it", name, **more)
        assert answer.status_code == 200, answer.text
        assert tokens(complete(server, model="it")) == [tiny.greedy(PROMPT, name, COUNT)]
        if name == "stable":
            assert unload(server, "it").json()["freed_pages"] > 0
    assert unload(server, "it").status_code == 200
    assert unload(server, "it").status_code == 404
    assert complete(server, model="it").status_code == 404


def test_w04_unloading_in_mid_stream_changes_nothing_for_the_stream(
    server: Server, tiny: TinyAdapters
) -> None:
    """W04, W06: new requests are refused at once; the same name loads anew meanwhile."""
    count = 200
    wanted = tiny.greedy(PROMPT, "stable", count)
    assert load(server, "it", tiny.path("stable")).status_code == 200
    body = {
        "model": "it", "prompt": PROMPT, "max_tokens": count, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    got: list[int] = []
    status = None
    tiny.slow.touch()  # so that the stream is not over before the adapter is unloaded
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=PATIENCE_S
    ) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            got += json.loads(line[6:])["choices"][0].get("token_ids") or []
            if status is None:
                status = unload(server, "it").json()["status"]
                assert complete(server, model="it").status_code == 404
                assert load(server, "it", tiny.path("other")).status_code == 200
                tiny.slow.unlink()
                assert tokens(complete(server, model="it")) == [tiny.greedy(PROMPT, "other", COUNT)]
    assert status == "draining"
    assert got == wanted
    assert unload(server, "it").status_code == 200


def test_w08_what_was_unloaded_is_freed_by_an_idle_server(
    server: Server, tiny: TinyAdapters
) -> None:
    """W08: slots and pages balance without another request."""
    for name in ("x", "y"):
        load(server, name, tiny.path("other" if name == "x" else "stable"))
        complete(server, model=name)
        unload(server, name)
    server.wait_until_idle()
    for adapter in ("all", "few"):
        unload(server, adapter)
    server.wait_for("manyroots:adapter_slots_used", lambda value: value == 0)
    for adapter in ("all", "few"):
        assert load(server, adapter, tiny.path(adapter)).status_code == 200


def _nan(tensors: dict[str, Any]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def _half(tensors: dict[str, Any]) -> None:
    del tensors[next(name for name in tensors if "lora_A" in name)]


def _beyond(header: dict[str, Any]) -> None:
    entry = next(value for name, value in header.items() if name != "__metadata__")
    entry["data_offsets"][1] += 2**40


def _truncate(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def _fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def _link_out(folder: Path) -> None:
    outside = folder.parent.parent / "outside.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


BROKEN: dict[str, Any] = {
    "dora": lambda folder: rewrite_config(folder, use_dora=True),
    "rank 0": lambda folder: rewrite_config(folder, r=0),
    "rank over the limit": lambda folder: rewrite_config(folder, r=1000),
    "not json": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "no config": lambda folder: (folder / "adapter_config.json").unlink(),
    "bin only": lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
    "nan": lambda folder: rewrite_weights(folder, _nan),
    "half a pair": lambda folder: rewrite_weights(folder, _half),
    "offsets": lambda folder: rewrite_header(folder, _beyond),
    "truncated": _truncate,
    "fifo": _fifo,
    "link out": _link_out,
}


def test_s03_broken_adapters_are_refused_while_good_streams_stay_the_same(
    server: Server, tiny: TinyAdapters
) -> None:
    """S03, W10, W12: each with a 4xx and a reason; 32 streams beside them are unharmed."""
    for case, spoil in BROKEN.items():
        folder = tiny.write(f"broken {case}", RECIPES["few"])
        spoil(folder)
    paths = {case: f"broken {case}" for case in BROKEN} | {
        "missing": "nowhere", "outside": "/etc", "up": "../model", "empty": "",
    }  # fmt: skip
    adapters = ["all", "few", "tiny"]
    wanted = {
        name: tiny.greedy(PROMPT, None if name == "tiny" else name, COUNT) for name in adapters
    }
    with concurrent.futures.ThreadPoolExecutor(33) as threads:
        streams = [
            (name, threads.submit(complete, server, model=name))
            for name in [adapters[index % 3] for index in range(32)]
        ]
        for case, path in paths.items():
            answer = load(server, "bad", path)
            assert 400 <= answer.status_code < 500, f"{case}: {answer.text}"
            assert len(answer.json()["error"]["message"]) > 20, case
        for name, stream in streams:
            assert tokens(stream.result()) == [wanted[name]]
    assert "bad" not in names(server)
    server.wait_until_idle()


@pytest.mark.parametrize("name", ["tiny", "a//b", "all", "", "x" * 200])
def test_s03_names_that_cannot_be_taken(server: Server, tiny: TinyAdapters, name: str) -> None:
    """S03: the base model's, a path's, one that exists."""
    answer = load(server, name, tiny.path("other"))
    assert answer.status_code == 400
    assert server.status("/health") == 200


def test_s03_the_admin_key_is_asked_for(server: Server) -> None:
    """S03"""
    body = {"lora_name": "a", "lora_path": "other"}
    assert post(server, "/v1/load_lora_adapter", body).status_code == 403
    assert post(server, "/load_lora_adapter", body, {}).status_code == 401


def test_s04_metrics_of_adapters(server: Server) -> None:
    """S04, W20: a warm request and a cold one are told apart."""
    complete(server, model="few")
    complete(server, model="few")
    text = server.get("/metrics").text
    assert server.metric("manyroots:adapter_slots_total") == 2
    assert re.search(r'adapter_requests_total{adapter="few",model_name="tiny"} [1-9]', text)
    first = "manyroots:adapter_time_to_first_token_seconds_count"
    assert re.search(rf'^{first}{{adapter_was="warm",.*}} [1-9]', text, re.M)
    assert re.search(rf'^{first}{{adapter_was="disk",.*}} [1-9]', text, re.M)
    loads = "manyroots:adapter_load_seconds_count"
    assert re.search(rf'^{loads}{{.*source="storage",target="host"}} [1-9]', text, re.M)


def test_a_server_with_200_adapters_starts_as_fast_as_with_2(
    started: tuple[Server, float], tiny: TinyAdapters
) -> None:
    """W01: names are noted at start, and nothing is read."""
    modules = [f"n{index}={tiny.path('all')}" for index in range(200)]
    with running(*flags(tiny), "--lora-modules", *modules) as server:
        server.wait_until_ready()
        few, many = started[1], server.cpu_seconds()
        assert len(names(server)) == 201
        assert tokens(complete(server, model="n199"))
    assert many < few * 1.5 + 1.0, f"2 adapters: {few:.2f} s, 200: {many:.2f} s"
