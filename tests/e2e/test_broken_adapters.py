"""Every kind of broken adapter is refused with a reason, while 32 good streams stay as they are.

One server for all: broken folders are loaded through the endpoint, and named at start and read when
a request wants them. Beside them, base and adapters stream; their text and tokens must be those of
a quiet server. Afterwards pages and slots balance.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.e2e.adapter_server import MAX_RANK, MODEL, AdapterServer, completion, serving
from tests.helpers.adapter_folders import (
    CONFIG,
    WEIGHTS,
    Recipe,
    rewrite_config,
    rewrite_header,
    rewrite_weights,
    tiny_targets,
    write_adapter,
)
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_adapters import RECIPES, TinyAdapters

COUNT = 24
NUM_STREAMS = 8
"""Two for each model: they stream all the time, so that more cost most of the file's time."""
Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"
TARGETS = tiny_targets(num_layers=3, hidden=48, kv=16, intermediate=80, vocab=300)
"""As the tiny model's."""

Spoil = Callable[[Path], object]


# What may be wrong with a folder


def config(**changes: Any) -> Spoil:
    return lambda folder: rewrite_config(folder, **changes)


def config_bytes(raw: bytes) -> Spoil:
    return lambda folder: (folder / CONFIG).write_bytes(raw)


def tensor(name: str, value: Tensor | None) -> Spoil:
    """Put a tensor into the file, or take it out."""

    def change(tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return lambda folder: rewrite_weights(folder, change)


def number(name: str, value: float) -> Spoil:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3:4].fill_(value)

    return lambda folder: rewrite_weights(folder, change)


def weights_bytes(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / WEIGHTS
        file.write_bytes(change(file.read_bytes()))

    return spoil


def offsets(change: Callable[[list[dict[str, Any]]], None]) -> Spoil:
    """Change the header's entries, in the order of their data."""

    def on_header(header: dict[str, Any]) -> None:
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        change(sorted(entries, key=lambda entry: entry["data_offsets"]))

    return lambda folder: rewrite_header(folder, on_header)


def overlap(entries: list[dict[str, Any]]) -> None:
    same = [entry for entry in entries if entry["shape"] == entries[0]["shape"]]
    same[1]["data_offsets"] = same[0]["data_offsets"]


def beyond(entries: list[dict[str, Any]]) -> None:
    rows = 2**40 // (4 * entries[-1]["shape"][1])
    entries[-1]["shape"][0] += rows
    entries[-1]["data_offsets"][1] += rows * 4 * entries[-1]["shape"][1]


def another_model(folder: Path) -> None:
    shutil.rmtree(folder)
    write_adapter(folder, tiny_targets(num_layers=3, hidden=40), RECIPES["few"])


def fifo(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


def link_out(folder: Path) -> None:
    outside = folder.parent.parent / f"outside {folder.name}"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


def linked_folder(folder: Path) -> None:
    outside = folder.parent.parent / f"outside {folder.name}"
    folder.rename(outside)
    folder.symlink_to(outside)


BROKEN: dict[str, tuple[Spoil, str]] = {
    "config-not-json": (config_bytes(b"{"), "not valid JSON"),
    "config-of-bytes": (config_bytes(b"\xff\xfe"), "not UTF-8"),
    "config-no-object": (config_bytes(b"[]"), "must be a JSON object"),
    "config-huge": (config_bytes(b" " * (5 << 20)), "at most"),
    "config-deep": (config_bytes(b"[" * 100_000), "nested too deeply"),
    "rank-0": (config(r=0), "r is 0"),
    "rank-negative": (config(r=-4), "r is -4"),
    "rank-over-the-limit": (
        lambda folder: write_adapter(folder, TARGETS, Recipe(rank=MAX_RANK + 1)),
        "--max-lora-rank",
    ),
    "pattern-of-no-module": (config(rank_pattern={"q_prj": 2}), "matches no module"),
    "pattern-no-expression": (config(alpha_pattern={"(": 2}), "not a regular expression"),
    "pattern-bomb": (config(alpha_pattern={"(.*.*)*(.*.*)*z": 2}), "matches no module"),
    "dora": (config(use_dora=True), "DoRA"),
    "dora-tensors": (tensor(f"{Q}.lora_magnitude_vector", torch.zeros(48)), "DoRA"),
    "modules-to-save": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "whole-module": (tensor("base_model.model.score.weight", torch.zeros(1)), "the whole weight"),
    "extra-vocabulary": (
        tensor(f"{EMBEDDING}.base_layer.weight", torch.zeros(302, 48)), "another vocabulary",
    ),
    "unknown-modules": (config(target_modules=["q_proj", "in_proj"]), "in_proj"),
    "unknown-layer": (
        tensor(f"{Q.replace('.0.', '.9.')}.lora_A.weight", torch.zeros(3, 48)), "layers.9",
    ),
    "not-lora": (config(peft_type="LOHA"), "LOHA"),
    "another-model": (another_model, "need"),
    "wrong-shape": (tensor(f"{Q}.lora_A.weight", torch.zeros(3, 47)), "need"),
    "nan": (number(f"{Q}.lora_A.weight", float("nan")), "NaN or infinite"),
    "infinite": (number(f"{Q}.lora_B.weight", float("-inf")), "NaN or infinite"),
    "a-without-b": (tensor(f"{Q}.lora_B.weight", None), "lora_A without lora_B"),
    "b-without-a": (tensor(f"{Q}.lora_A.weight", None), "lora_B without lora_A"),
    "truncated": (weights_bytes(lambda raw: raw[:-100]), "bytes of data and"),
    "truncated-header": (weights_bytes(lambda raw: raw[:100]), "its header claims"),
    "empty-file": (weights_bytes(lambda raw: b""), "fewer than any safetensors"),
    "header-of-2-63": (
        weights_bytes(lambda raw: (1 << 63).to_bytes(8, "little") + raw[8:]), "claims",
    ),
    "overlapping-offsets": (offsets(overlap), "overlaps"),
    "offsets-out-of-range": (offsets(beyond), "bytes of data and"),
    "bin-only": (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "bin"),
    "no-weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "fifo": (fifo(WEIGHTS), "FIFO"),
    "device": (link(WEIGHTS, "/dev/zero"), "device|folder that adapters may come from"),
}  # fmt: skip
"""Found when a folder is read, through the endpoint or by the first request."""

OUTSIDE = "not in a folder that adapters may come from"
BROKEN_FOLDERS: dict[str, tuple[Spoil, str]] = {
    "no-config": (lambda folder: (folder / CONFIG).unlink(), f"has no {CONFIG}"),
    "config-fifo": (fifo(CONFIG), "FIFO"),
    "weights-linked-out": (link_out, OUTSIDE),
    "folder-linked-out": (linked_folder, OUTSIDE),
    "config-linked-out": (link(CONFIG, "/etc/hostname"), OUTSIDE),
}
"""Refused at start if named there, or allowed since the operator says so."""

PATHS = {
    "nowhere": "does not exist",
    "../model": OUTSIDE,
    "/etc": OUTSIDE,
    "few/../../model": OUTSIDE,
    "": "empty",
    "a\0b": "NUL",
    f"few/{CONFIG}": "is not a folder",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    tiny = TinyAdapters(tmp_path_factory.mktemp("tiny"))
    for name, (spoil, _) in (BROKEN | BROKEN_FOLDERS).items():
        spoil(tiny.write(f"broken {name}", RECIPES["few"]))
    return tiny


@pytest.fixture(scope="module")
def server(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    good = [f"{name}={tiny.path(name)}" for name in ("all", "few", "stable")]
    bad = [f"{name}={tiny.path(f'broken {name}')}" for name in BROKEN]
    env = slow_steps(tiny.model.parent, while_there=tiny.slow)
    with serving(tiny, *good, *bad, env=env) as server:
        yield server


# The good streams


def bodies() -> list[dict[str, Any]]:
    models = (MODEL, "all", "few", "stable")
    prompts = [[(seed * 17 + index * 5) % 190 for index in range(6 + seed)] for seed in (0, 7)]
    return [completion(model, prompt, COUNT) for prompt in prompts for model in models]


def heard(server: AdapterServer, body: dict[str, Any]) -> tuple[str, list[int]]:
    """All text and tokens of a stream."""
    text, ids = "", []
    for event in server.stream(body):
        text += event["choices"][0]["text"]
        ids += event["choices"][0].get("token_ids") or []
    return text, ids


@pytest.fixture(scope="module")
def quiet(server: AdapterServer) -> list[tuple[str, list[int]]]:
    """What each stream gives when no other request runs."""
    return [heard(server, body) for body in bodies()]


@contextlib.contextmanager
def good_streams(server: AdapterServer, quiet: list[tuple[str, list[int]]]) -> Iterator[None]:
    """Callers stream again and again until the block is over, and hear what they should."""
    is_over = threading.Event()

    def listen(body: dict[str, Any], wanted: tuple[str, list[int]]) -> None:
        while True:
            assert heard(server, body) == wanted, body
            if is_over.is_set():
                return

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        listeners: list[Future[None]] = [
            threads.submit(listen, body, wanted)
            for body, wanted in zip(bodies(), quiet, strict=True)
        ]
        assert len(listeners) == NUM_STREAMS
        try:
            yield
        finally:
            is_over.set()
        for listener in listeners:
            listener.result()


def fault(answer: httpx.Response, saying: str) -> str | None:
    """What is wrong with a refusal; None if nothing is."""
    if not 400 <= answer.status_code < 500:
        return f"{answer.status_code}: {answer.text}"
    message = answer.json()["error"]["message"]
    if not any(part in message for part in saying.split("|")):
        return f"does not say {saying!r}: {message}"
    return None


def test_broken_adapters_are_refused_by_the_load_endpoint_while_others_stream(
    server: AdapterServer, tiny: TinyAdapters, quiet: list[tuple[str, list[int]]]
) -> None:
    """W10, W12, S03: each gets a 4xx with the reason, and no adapter name remains."""
    before = server.names()
    cases = {name: (f"broken {name}", saying) for name, (_, saying) in BROKEN.items()}
    cases |= {name: (f"broken {name}", saying) for name, (_, saying) in BROKEN_FOLDERS.items()}
    cases |= {f"path {path!r}": (path, saying) for path, saying in PATHS.items()}
    faults = {}
    with good_streams(server, quiet):
        for case, (path, saying) in cases.items():
            faults[case] = fault(server.load("bad", path), saying)
    assert {case: wrong for case, wrong in faults.items() if wrong} == {}
    assert server.names() == before
    server.assert_balance()


def test_broken_adapters_named_at_start_fail_their_own_requests_while_others_stream(
    server: AdapterServer, tiny: TinyAdapters, quiet: list[tuple[str, list[int]]]
) -> None:
    """W10, W12: streamed or not, a 4xx with the reason; the folder is read again when wanted."""
    faults = {}
    with good_streams(server, quiet):
        for case, (_, saying) in BROKEN.items():
            faults[case] = fault(server.complete(case, [5, 6, 7]), saying)
        streamed = completion("nan", [5, 6, 7], 4) | {"stream": True}
        answer = server.post("/v1/completions", streamed)
        faults["streamed"] = fault(answer, "NaN or infinite")
        tiny.write("broken nan", RECIPES["few"])
        mended = server.complete("nan", [5, 6, 7])
    assert {case: wrong for case, wrong in faults.items() if wrong} == {}
    assert mended.status_code == 200
    assert mended.json()["choices"] == server.complete("few", [5, 6, 7]).json()["choices"]
    server.assert_balance()


def test_names_and_unloads_that_make_no_sense_are_refused_while_others_stream(
    server: AdapterServer, tiny: TinyAdapters, quiet: list[tuple[str, list[int]]]
) -> None:
    """S03: taken names, the model's own, paths; unknown names, and those unloaded already."""
    with good_streams(server, quiet):
        for name, saying in {
            "few": "exists already", MODEL: "base model", "a//b": "like a path", "..": "a path",
            "": "has 0 characters", "x" * 200: "has 200 characters", "a\nb": "other characters",
        }.items():  # fmt: skip
            assert fault(server.load(name, "other"), saying) is None, name
        assert server.unload("nobody").status_code == 404
        assert server.unload(MODEL).status_code == 404
        assert server.load("once", "other").status_code == 200
        assert server.unload("once").status_code == 200
        assert server.unload("once").status_code == 404
        assert server.load("once", "other").status_code == 200
        tiny.slow.touch()  # so that the stream is not over before the adapter is unloaded
        stream = server.stream(completion("once", [5, 6, 7], 200))
        next(stream)
        assert server.unload("once").json()["status"] == "draining"
        assert server.unload("once").status_code == 404
        assert server.load("once", "stable").status_code == 200, "while the old one drains"
        tiny.slow.unlink()
        assert server.unload("once").status_code == 200
        for _ in stream:
            pass
    server.assert_balance()


TOUCH = """
import os, sys
time_ns = 10**18
print("ready", flush=True)
while True:
    time_ns += 1
    os.utime(sys.argv[1], ns=(time_ns, time_ns))
"""


def test_files_that_change_while_they_are_read_are_refused(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    """W12: another process writes all the time; sooner or later it does so during a read."""
    folder = tiny.write("changing", Recipe(rank=MAX_RANK, seed=6))
    toucher = subprocess.Popen(
        [sys.executable, "-c", TOUCH, str(folder / WEIGHTS)], stdout=subprocess.PIPE
    )
    try:
        assert toucher.stdout is not None
        assert toucher.stdout.readline()
        for _ in range(100):
            answer = server.load("changing", "changing")
            if answer.status_code != 200:
                break
            assert server.unload("changing").status_code == 200
        assert fault(answer, "changed while it was read") is None
    finally:
        toucher.kill()
        toucher.communicate()
    assert server.load("changing", "changing").status_code == 200, "it is whole now"
    assert server.unload("changing").status_code == 200


def test_pages_and_slots_balance_when_all_is_unloaded(server: AdapterServer) -> None:
    """W08, N12: after all of that."""
    server.assert_empty_after_unloading_all()
