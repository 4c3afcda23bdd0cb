"""Replicas, gateways and engines are killed under load; each answer must be what the model gives.

    python -m tests.soaks.replica_kills 20 [--seed 0] [--kind lfm2] [--backend ray]

Kills an engine, a gateway, another engine and the router, again and again; a seed draws which, and
when. Streams of several callers run without a pause at two gateways, with the base model and an
adapter. A request that has streamed nothing is answered, perhaps by another replica, and never
refused; a caller whose connection breaks before any output asks again, as OpenAI's clients do. A
stream that had begun may end with a clear error. Prints a line of JSON for each kill and one for
all; the exit code is 1 if any answer was wrong or lost. `--backend ray` runs the engines in Ray
actors. Kill N of a seed is the same in every run, so a run can begin at any kill: `--first N`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from manyroots.bench.peers import transformers_model
from manyroots.config import DEFAULT_MODEL, ModelSettings
from manyroots.models.load import load_model
from manyroots.models.source import resolve_source
from tests.e2e.adapter_server import ADMIN, MODEL, PAGE_SIZE, completion
from tests.e2e.conftest import running
from tests.e2e.test_gateways import HEADERS, KEY, NUM_GATEWAYS, PROMPT, Gateways
from tests.helpers.adapter_folders import Recipe
from tests.helpers.patience import PATIENCE_S
from tests.helpers.replica_load import Asked, StreamLoad
from tests.helpers.tiny_adapters import ATTENTION, TinyAdapters

NUM_REPLICAS = 3
NUM_TOKENS = 40
ERRORS = ("killed by SIGKILL", "the router process is gone")
KINDS = ("engine", "gateway", "engine", "router")
"""In turn, so that any four kills have all of them."""


class DefaultAdapters(TinyAdapters):
    """The default model with its real weights in place of a tiny one."""

    def __init__(self, folder: Path) -> None:
        source, cpu = resolve_source(ModelSettings()), torch.device("cpu")
        own = load_model(source, dtype=torch.float32, device=cpu, load_format="auto", seed=0)
        self.model, self.dirs = Path(DEFAULT_MODEL), folder / "adapters"
        self.targets = own.adapter_targets()
        self._theirs = transformers_model(own, source)
        self._theirs.generation_config.eos_token_id = None


def victims(served: Gateways) -> dict[str, list[int]]:
    """Pids by kind, from what the server lists."""
    listed = served.clients[0].get("/v1/replicas", headers=ADMIN).json()["data"]
    return {
        "engine": [view["pid"] for view in listed if view["is_up"]],
        "gateway": served.pids(),
        "router": [served.router()],
    }


def wait_until_whole(served: Gateways) -> None:
    """All gateways answer, and all replicas are up."""
    deadline = time.monotonic() + PATIENCE_S
    for client in served.clients:
        while True:
            served.wait_until_ready(client)
            with contextlib.suppress(Exception):
                listed = client.get("/v1/replicas", headers=ADMIN).json()["data"]
                if sum(view["is_up"] for view in listed) == NUM_REPLICAS:
                    break
            assert time.monotonic() < deadline, served.server.log()[-3000:]
            time.sleep(0.1)


def run(num_kills: int, seed: int, first: int, kind: str, backend: str) -> dict[str, Any]:
    """Gives the kills and answers of all of it."""
    killed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        top = Path(folder)
        home = top / "model"
        tiny = DefaultAdapters(home) if kind == "smollm2" else TinyAdapters(home, kind)
        tiny.write("soak", Recipe(rank=8, modules=ATTENTION, seed=7))
        keys = top / "keys.json"
        keys.write_text(json.dumps({"keys": [{"name": "all", "key": KEY, "adapters": ["*"]}]}))
        server = stack.enter_context(running(
            str(tiny.model), "--served-model-name", MODEL, "--keys-file", str(keys),
            "--block-size", str(PAGE_SIZE), "--max-num-seqs", "40",
            "--num-gpu-blocks-override", "512", "--device", "cpu",
            "--gateways", str(NUM_GATEWAYS), "--replicas", str(NUM_REPLICAS),
            "--replica-backend", backend, "--max-engine-restarts", "1000",
            "--max-api-restarts", "1000", "--enable-lora", "--max-loras", "2",
            "--max-lora-rank", "64", "--enable-lora-endpoints", "--admin-key", "the-admin",
            "--lora-dirs", str(tiny.dirs),
        ))  # fmt: skip
        served = Gateways(server)
        loaded = served.admin(
            0, "/v1/load_lora_adapter", lora_name="soak", lora_path=tiny.path("soak")
        )
        assert loaded.status_code == 200, loaded.text
        asked = [
            Asked(completion(name or MODEL, prompt, NUM_TOKENS), tiny.greedy(prompt, name, 40))
            for name in (None, "soak")
            for prompt in (PROMPT, PROMPT[::-1], PROMPT[5:30])
        ]
        loads = [
            stack.enter_context(
                StreamLoad(url, HEADERS, asked, num_callers=4, errors=ERRORS, may_break=True)
            )
            for url in served.urls
        ]
        for number in range(first, first + num_kills):
            draw = random.Random(f"{seed} {number}")
            wait_until_whole(served)
            for load in loads:
                load.wait_for_more(draw.randint(1, 6))
            chosen, begin = KINDS[number % len(KINDS)], time.monotonic()
            pid = draw.choice(victims(served)[chosen])
            os.kill(pid, signal.SIGKILL)
            killed[chosen] += 1
            for load in loads:
                load.wait_for_more(2)
            counts = sum((load.counts for load in loads), start=Counter())
            wrong = [text for load in loads for text in load.wrong]
            done = {
                "kill": number, "kind": chosen, "pid": pid, "wrong": wrong, **counts,
                "seconds": round(time.monotonic() - begin, 1),
            }  # fmt: skip
            print(json.dumps(done), flush=True)
            if wrong:
                break
        wait_until_whole(served)
    counts = sum((load.counts for load in loads), start=Counter())
    return {
        "seed": seed, "first": first, "model": kind, "backend": backend,
        "kills": killed.total(), "killed": dict(killed), "answers": dict(counts),
        "wrong": [text for load in loads for text in load.wrong],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soaks.replica_kills")
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", default="llama", help="of the tiny model, or smollm2")
    parser.add_argument("--backend", default="processes", choices=("processes", "ray"))
    given = parser.parse_args()
    found = run(given.kills, given.seed, given.first, given.kind, given.backend)
    print(json.dumps(found))
    return int(bool(found["wrong"]) or found["kills"] < given.kills)


if __name__ == "__main__":
    sys.exit(main())
