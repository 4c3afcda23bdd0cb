"""Real servers under storms: what clients, trainers and operators do, each answer against a server
that reuses nothing.

    python -m tests.soaks.served_storms --requests 1000 [--seed 0] [--state FILE]

A seed draws a model, a storage (a folder or Redis) that one or two servers share, and sizes that
are too small. Clients ask over HTTP, many at once, and go away at random moments; adapters get
other weights under their name, and so does the model; it is paused, put to sleep and woken; engines
and whole servers are killed and started again on what they left; storage is damaged, emptied,
killed and full. In the end each answer is asked again of a server that computes one request at a
time, and must be the same; nothing may be held, no thread, open file, temporary file or process be
left, and the counters of /metrics must add up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from tests.e2e.conftest import API_KEY, HEADERS, Server
from tests.helpers.patience import PATIENCE_S
from tests.soaks.differential import PAGE
from tests.soaks.mixed_workloads import (
    CONTENTS,
    INVOCATION,
    MAX_LEN,
    MIXES,
    VOCAB,
    WEIGHTS,
    World,
    world_of,
)  # fmt: skip
from tests.soaks.near_ties import CLOSE
from tests.soaks.slices import command
from tests.unit.store.tiers import RedisServer, server_program

ADMIN = {"authorization": "Bearer the-admin"}
MODEL = "tiny"
NAMES = ("red", "green", "blue")
NUM_REQUESTS = 250
NUM_CLIENTS = 8


@dataclass
class Asked:
    """A request, what came of it, and with which weights it may have been computed."""

    body: dict[str, Any]
    name: str | None
    weights: set[str]
    contents: set[str | None]
    choices: list[dict[str, Any]] | None = None
    status: int = 0
    error: str = ""
    may_fail: bool = False
    usage: dict[str, Any] = field(default_factory=dict)


class Serving:
    """One server, its lives, and what is known of it."""

    def __init__(self, world: World, folder: Path, flags: list[str]) -> None:
        self.world, self.folder, self.flags = world, folder, flags
        self.weights = {WEIGHTS[0]}
        self.contents: dict[str, set[str | None]] = {}
        self.live: dict[int, Asked] = {}
        self.num_disruptions = self.num_replaced = 0
        """Operations under way that may fail requests."""
        self.is_down = False
        self.told: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        with mock.patch.dict(os.environ, {"TMPDIR": str(self.folder)}):
            self.server = Server(
                str(self.world.folder / WEIGHTS[0]), "--served-model-name", MODEL,
                "--api-key", API_KEY, "--admin-key", "the-admin", "--block-size", str(PAGE),
                "--max-model-len", str(MAX_LEN), "--enable-lora", "--enable-lora-endpoints",
                "--lora-dirs", str(self.world.folder), "--weights-dirs", str(self.world.folder),
                *self.flags,
            )  # fmt: skip

    async def ready(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self.client = httpx.AsyncClient(
            base_url=self.server.url, timeout=PATIENCE_S, limits=limits, headers=HEADERS,
            verify=False,
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self.server.process.poll() is None, self.server.log()[-3000:]
            assert time.monotonic() < deadline, self.server.log()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if (await self.client.get("/ready")).status_code == 200:
                    break
            await asyncio.sleep(0.1)
        self.told_at_start = await self.metrics()

    # What is asked

    async def admin(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return await self.client.post(path, json=body or {}, headers=ADMIN)

    async def load(self, name: str, content: str, rng: random.Random) -> None:
        before = self.contents.get(name, {None})
        self._may_be(name, before | {content})
        path, replaced = Path(self.world.adapter(content)), contextlib.nullcontext()
        if rng.random() >= 0.5:  # its files are replaced while the old ones are in use
            path, replaced = self.folder / f"of-{name}", self._replaced()
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self.world.adapter(content), path)
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        with replaced:
            answer = await self.admin("/v1/load_lora_adapter", body)
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 200:
            self.contents[name] = {content}

    def _may_be(self, name: str, contents: set[str | None]) -> None:
        self.contents[name] = contents
        for asked in self.live.values():
            if asked.name == name:
                asked.contents |= contents

    @contextlib.contextmanager
    def _replaced(self) -> Iterator[None]:
        """Until the engine knows of the new files, a name means the content of the old ones. A
        request fails if no copy of that content is in memory."""
        self.num_replaced += 1
        for asked in self.live.values():
            self._disturb(asked)
        try:
            yield
        finally:
            self.num_replaced -= 1

    def _disturb(self, asked: Asked) -> None:
        """What happens just now may be felt by this one."""
        has_adapter = asked.name is not None
        asked.may_fail |= self.num_disruptions > 0 or (self.num_replaced > 0 and has_adapter)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Gone for a long time: most clients come back later."""
        self.is_down = True
        try:
            with self.disrupted():
                yield
        finally:
            self.is_down = False

    @contextlib.contextmanager
    def disrupted(self) -> Iterator[None]:
        """Requests that are live in this time may fail."""
        self.num_disruptions += 1
        for asked in self.live.values():
            self._disturb(asked)
        try:
            yield
        finally:
            self.num_disruptions -= 1

    async def update(self, weights: str, *, aborts: bool) -> None:
        self.weights = self.weights | {weights}
        for asked in self.live.values():
            asked.weights |= self.weights
        body = {"model_path": weights, "abort_all_requests": aborts}
        with self.disrupted() if aborts else contextlib.nullcontext():
            answer = await self.admin("/update_weights", body)
        if answer.status_code == 200:
            self.weights = {weights}
            self.told["updates"] += 1
        else:
            assert answer.status_code == 503, answer.text

    async def ask(self, asked: Asked, goes_after_s: float | None, streams: bool) -> None:
        self.live[id(asked)] = asked
        self._disturb(asked)
        try:
            async with asyncio.timeout(goes_after_s):
                await (self._stream(asked) if streams else self._complete(asked))
        except TimeoutError:
            assert goes_after_s is not None, f"no answer in {PATIENCE_S} s: {asked}"
            self.told["gone"] += 1
        except httpx.HTTPError as error:
            asked.error = repr(error)
            asked.status = -1
        finally:
            del self.live[id(asked)]
            self._disturb(asked)

    async def _complete(self, asked: Asked) -> None:
        answer = await self.client.post("/v1/completions", json=asked.body)
        asked.status = answer.status_code
        if answer.status_code == 200:
            asked.choices = answer.json()["choices"]
            asked.usage = answer.json()["usage"]
        else:
            asked.error = answer.text

    async def _stream(self, asked: Asked) -> None:
        body = asked.body | {"stream": True, "stream_options": {"include_usage": True}}
        choices: dict[int, dict[str, Any]] = {}
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            asked.status = answer.status_code
            if answer.status_code != 200:
                asked.error = (await answer.aread()).decode()
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    asked.status, asked.error = 500, line
                    return
                asked.usage = event.get("usage") or asked.usage
                for part in event["choices"]:
                    whole = choices.setdefault(part["index"], {"index": part["index"]})
                    _join(whole, part)
        asked.choices = [choices[index] for index in sorted(choices)]

    # What it says of itself

    async def metrics(self) -> dict[str, float]:
        text = (await self.client.get("/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^(\S+?) (\S+)$", text, re.M)}

    def engine_pid(self) -> int:
        return self.server.children()[0]

    async def stop(self) -> None:
        """As an operator does; nothing may be left."""
        await self.client.aclose()
        children = self.server.children()
        self.server.signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.server.process.wait, PATIENCE_S)
        assert code == 0, f"ended with {code}:\n{self.server.log()[-3000:]}"
        assert not any(Path(f"/proc/{pid}").exists() for pid in children), "the engine is left"

    async def kill(self) -> None:
        """kill -9 of everything, and a new start on what is left."""
        with self.down():
            children = self.server.children()
            self.server.process.kill()
            await asyncio.to_thread(self.server.process.wait)
            await wait_for(lambda: not any(map(is_running, children)), "the engine outlives it")
            self.told["num_killed"] += 1
            await self.client.aclose()
            self.weights = {WEIGHTS[0]}
            self.contents.clear()
            self.start()
            await self.ready()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add an event of a stream to its choice, so that it looks as an answer in one piece."""
    whole["text"] = whole.get("text", "") + part["text"]
    whole.setdefault("token_ids", []).extend(part.get("token_ids") or [])
    for name in ("finish_reason", "stop_reason"):
        whole[name] = part.get(name) or whole.get(name)
    if part.get("logprobs"):
        scores = whole.setdefault("logprobs", {})
        for name, values in part["logprobs"].items():
            scores.setdefault(name, []).extend(values or [])


class Storm:
    """What a seed does to its servers."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"storm {seed}")
        self.told: Counter[str] = Counter()
        self.world = world_of(rng.choice(MIXES))
        self.folder = Path(tempfile.mkdtemp(dir=self.world.folder))
        self.redis = None
        if server_program() and rng.random() < 0.4:
            self.redis = RedisServer(self.folder)
        self.heads = [self._text(rng.choice((3, 8, 13, 24, 31, 45))) for _ in range(6)]
        self.flags = self._flags()
        self.asked: list[tuple[Serving, Asked]] = []
        self.servings: list[Serving] = []
        for number in range(rng.choice((1, 2))):
            folder = self.folder / f"tmp{number}"
            folder.mkdir()
            self.servings.append(Serving(self.world, folder, self.flags))

    def _text(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    def _flags(self) -> list[str]:
        rng, world = self.rng, self.world
        max_num_seqs = rng.choice((2, 4, 8))
        num_checkpoints = rng.choice((2, 6))
        num_pages = rng.choice((1.1, 1.5, 2.5)) * (MAX_LEN // PAGE)
        given: dict[str, Any] = {
            "max-num-seqs": max_num_seqs, "max-num-batched-tokens": rng.choice((9, 24, 64)),
            "kv-cache-memory-bytes": int(
                num_pages * world.page_bytes * (1.3 if world.mix != "full" else 1)
                + (max_num_seqs + num_checkpoints) * world.state_bytes
            ),
            "max-loras": rng.choice((1, 2)), "max-cpu-loras": rng.choice((2, 3)),
            "kv-storage": self.redis.url if self.redis else f"file://{self.folder}/store",
            "prefetch": rng.choice(("wait", "wait", "best-effort")),
            "write-back": rng.choice(("through", "through", "reused", "eviction")),
            "kv-check-share": 0.2, "max-engine-restarts": 20,
        }  # fmt: skip
        if world.state_bytes:
            given["checkpoint-memory-bytes"] = num_checkpoints * world.state_bytes
            given["checkpoint-interval-tokens"] = rng.choice((PAGE, 3 * PAGE))
        if rng.random() < 0.6:
            given["num-host-pages"] = rng.choice((1, 3, 20, 60))
        if self.redis is None and rng.random() < 0.4:
            given["kv-storage-size"] = 60 * 8192 / 2**30
        return [text for name, value in given.items() for text in (f"--{name}", str(value))]

    # What happens

    async def run(self, num_requests: int) -> None:
        await asyncio.gather(*(serving.ready() for serving in self.servings))
        for serving in self.servings:
            for name in NAMES:
                await serving.load(name, self.rng.choice(list(CONTENTS)), self.rng)
        await self._quiet()
        before = [self._held(serving) for serving in self.servings]
        try:
            await self._storm(num_requests)
            await self._calm()
            await self._quiet()
            for serving, (pid, held) in zip(self.servings, before, strict=True):
                await self._left(serving, pid, held)
                self.told.update(serving.told)
            await self._compare()
        finally:
            for serving in self.servings:
                if serving.server.process.poll() is not None:
                    print(serving.server.log()[-4000:], file=sys.stderr)
        for serving in self.servings:
            await serving.stop()
            left = [path.name for path in serving.folder.glob("*") if "of-" not in path.name]
            assert len(left) <= serving.told["num_killed"], f"temporary files are left: {left}"

    async def _storm(self, num_requests: int) -> None:
        todo = iter(range(num_requests))

        async def client() -> None:
            for _ in todo:
                await self._one()

        clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
        mischief = asyncio.create_task(self._mischief(todo))
        done, _ = await asyncio.wait(
            [*clients, mischief], return_when=asyncio.FIRST_EXCEPTION
        )  # fmt: skip
        for task in done:
            task.result()

    async def _one(self) -> None:
        rng = self.rng
        serving = rng.choice(self.servings)
        while serving.is_down and rng.random() < 0.95:
            await asyncio.sleep(0.3)
        prompt = list(rng.choice(self.heads))
        if self.asked and rng.random() < 0.4:
            _, said = rng.choice(self.asked[-20:])
            if said.choices and said.choices[0].get("token_ids") is not None:
                prompt = [*said.body["prompt"], *said.choices[0]["token_ids"]]
        prompt += self._text(rng.choice((0, 1, 2, 4, 11)))
        if rng.random() < 0.3:
            prompt = [*prompt[:30], *INVOCATION, *prompt[30:]]
        prompt = prompt[: MAX_LEN - 2]
        name = rng.choice((None, *NAMES))
        if name is not None and None in serving.contents.get(name, {None}):
            name = None
        contents: set[str | None] = {None} if name is None else set(serving.contents[name])
        asked = Asked(self._body(prompt, name), name, set(serving.weights), contents)
        self.asked.append((serving, asked))
        goes_after_s = rng.expovariate(20) if rng.random() < 0.2 else None
        can_stream = not ("echo" in asked.body and "logprobs" in asked.body)
        await serving.ask(asked, goes_after_s, can_stream and rng.random() < 0.5)
        if asked.status in (-1, 503):
            await asyncio.sleep(0.3)

    def _body(self, prompt: list[int], name: str | None) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = {
            "model": name or MODEL, "prompt": prompt, "return_token_ids": True,
            "max_tokens": min(MAX_LEN - len(prompt), rng.choice((1, 2, 9, 17, 30, 45))),
            "temperature": 0.0 if rng.random() < 0.6 else rng.choice((0.3, 1.0, 2.0)),
            "seed": rng.randrange(1000), "ignore_eos": rng.random() < 0.6,
        }  # fmt: skip
        if rng.random() < 0.25:
            body["n"] = rng.choice((2, 3))
        if rng.random() < 0.5:
            body["logprobs"] = rng.choice((0, 1, 5))
        if rng.random() < 0.2:
            body["echo"] = True
            if rng.random() < 0.4:
                body["max_tokens"] = 0
        if rng.random() < 0.15:
            body["cache_salt"] = rng.choice(("a", "b"))
        if rng.random() < 0.25:
            body["stop"] = rng.sample(["a", "lo", "e", "ab", "\ufffd\ufffd", "t h"], 2)
            body["include_stop_str_in_output"] = rng.random() < 0.5
        if rng.random() < 0.2:
            body["top_p"] = rng.choice((0.3, 0.9))
        return body

    async def _mischief(self, todo: Any) -> None:
        rng = self.rng
        often: list[tuple[float, Callable[[Serving], Awaitable[None]]]] = [
            (4, self._other_adapter), (2, self._pause), (2, self._update), (1, self._reset),
            (1.5, self._storage_fault), (1, self._run_away),
        ]  # fmt: skip
        once = [self._kill_engine, self._kill_server, self._sleep]
        rng.shuffle(once)
        turns = [todo.__length_hint__() * (3 - number) // 4 for number in range(len(once))]
        weights = [weight for weight, _ in often]
        while (left := todo.__length_hint__()) > 0:
            await asyncio.sleep(rng.expovariate(3))
            [(_, happen)] = rng.choices(often, weights)
            if turns and left < turns[0]:
                turns.pop(0)
                happen = once.pop()
            self.told[happen.__name__] += 1
            await happen(rng.choice(self.servings))

    async def _other_adapter(self, serving: Serving) -> None:
        await serving.load(self.rng.choice(NAMES), self.rng.choice(list(CONTENTS)), self.rng)

    async def _pause(self, serving: Serving) -> None:
        """Pauses and resumes in any order; in the end it runs."""
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            mode = self.rng.choice(("keep", "wait", "abort"))
            with serving.disrupted() if mode == "abort" else contextlib.nullcontext():
                answer = await serving.admin(f"/pause?mode={mode}")
                assert answer.status_code == 200, answer.text
            await asyncio.sleep(self.rng.random() / 10)
            if self.rng.random() < 0.3:
                await serving.admin("/resume")
        assert (await serving.admin("/resume")).status_code == 200

    async def _update(self, serving: Serving) -> None:
        await serving.update(self.rng.choice(WEIGHTS), aborts=self.rng.random() < 0.4)

    async def _reset(self, serving: Serving) -> None:
        assert (await serving.admin("/reset_prefix_cache")).status_code == 200

    async def _run_away(self, serving: Serving) -> None:
        """A storm of clients that all go at once."""
        after = self.rng.random() / 5
        prompt = self.rng.choice(self.heads)
        asked = [
            Asked(
                self._body([*prompt, *self._text(3)], None) | {"echo": False},
                None,
                set(serving.weights),
                {None},
            )
            for _ in range(20)
        ]
        await asyncio.gather(*(serving.ask(each, after, True) for each in asked))

    async def _kill_engine(self, serving: Serving) -> None:
        with serving.down():
            pid = serving.engine_pid()
            os.kill(pid, signal.SIGKILL)
            await wait_for(lambda: serving.server.children() not in ([], [pid]), "no new engine")
            await self._until_up(serving)

    async def _until_up(self, serving: Serving) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (await serving.client.get("/ready")).status_code != 200:
            assert time.monotonic() < deadline, serving.server.log()[-3000:]
            await asyncio.sleep(0.1)

    async def _kill_server(self, serving: Serving) -> None:
        await serving.kill()
        for name in NAMES:
            await serving.load(name, self.rng.choice(list(CONTENTS)), self.rng)

    async def _sleep(self, serving: Serving) -> None:
        with serving.down():
            mode = self.rng.choice(("wait", "abort"))
            beside = asyncio.create_task(self._while_asleep(serving))
            assert (await serving.admin(f"/sleep?mode={mode}")).status_code == 200
            await asyncio.sleep(self.rng.random())
            assert (await serving.admin("/wake_up")).status_code == 200
            await beside

    async def _while_asleep(self, serving: Serving) -> None:
        """An operation that is under way when the engine goes must be answered, too."""
        await asyncio.sleep(self.rng.random() / 50)
        kind = self.rng.choice(("load", "reset"))
        if kind == "load":
            await self._other_adapter(serving)
        else:
            answer = await serving.admin("/reset_prefix_cache")
            assert answer.status_code in (200, 503), answer.text

    async def _storage_fault(self, serving: Serving) -> None:
        if self.redis is None:
            self._spoil_files()
            return
        kind = self.rng.choice(("kill", "stop", "flip", "flush", "full"))
        self.told[f"redis {kind}"] += 1
        if kind == "kill":
            self.redis.stop()
            await asyncio.sleep(self.rng.random())
            self.redis = RedisServer(self.folder, port=self.redis.port)
        elif kind == "stop":
            self.redis.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(2 * self.rng.random())
            self.redis.process.send_signal(signal.SIGCONT)
        else:
            self._spoil_redis(kind)

    def _spoil_redis(self, kind: str) -> None:
        import redis

        assert self.redis is not None
        with redis.Redis(port=self.redis.port) as client:
            if kind == "flush":
                client.flushall()
            elif kind == "full":
                client.config_set("maxmemory", self.rng.choice((1, 2_000_000, 0)))
            else:
                keys: Any = client.keys("manyroots:*")
                for key in self.rng.sample(keys, min(5, len(keys))):
                    value = client.get(key)
                    if isinstance(value, bytes):
                        client.set(key, self._damaged(value))

    def _damaged(self, value: bytes) -> bytes:
        rng = self.rng
        if rng.random() < 0.3:
            return value[: rng.randrange(len(value))]
        changed = bytearray(value)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    def _spoil_files(self) -> None:
        rng, store = self.rng, self.folder / "store"
        kind = rng.choice(("flip", "flip", "empty", "used", "shard", "all", "read-only"))
        self.told[f"files {kind}"] += 1
        files = sorted(store.glob("v1/??/*"))
        if kind in ("flip", "empty"):
            for path in rng.sample(files, min(5, len(files))):
                with contextlib.suppress(FileNotFoundError):
                    value = path.read_bytes()
                    path.write_bytes(self._damaged(value) if kind == "flip" and value else b"")
        elif kind == "used":
            (store / "v1" / "used").write_bytes(rng.choice((b"", b"\0" * 8, b"\xff" * 8, b"abc")))
        elif kind == "shard" and files:
            shutil.rmtree(rng.choice(files).parent, ignore_errors=True)
        elif kind == "all":  # as `rm -rf` by an operator that needs the space
            shutil.rmtree(rng.choice((store, store / "v1")), ignore_errors=True)

    # In the end

    async def _calm(self) -> None:
        if self.redis is not None:
            self._spoil_redis("full")
        for serving in self.servings:
            assert (await serving.admin("/resume")).status_code == 200

    async def _quiet(self) -> None:
        for serving in self.servings:
            deadline = time.monotonic() + PATIENCE_S
            while not _is_quiet(numbers := await serving.metrics()):
                assert time.monotonic() < deadline, f"no quiet: {numbers}"
                await asyncio.sleep(0.05)

    def _held(self, serving: Serving) -> tuple[int, dict[str, int]]:
        pids = {"server": serving.server.api_pid, "engine": serving.engine_pid()}
        held = {}
        for who, pid in pids.items():
            held[f"{who} threads"] = len(os.listdir(f"/proc/{pid}/task"))
            held[f"{who} files"] = len(os.listdir(f"/proc/{pid}/fd"))
        return pids["engine"], held

    async def _left(self, serving: Serving, pid: int, before: dict[str, int]) -> None:
        numbers = await serving.metrics()
        pages = {
            kind: _one_of(numbers, f"manyroots:pages_{kind}")
            for kind in ("total", "free", "cached", "held")
        }
        assert pages["held"] == 0, pages
        assert pages["free"] + pages["cached"] == pages["total"], pages
        by_tier = _sum_of(numbers, "manyroots:prefix_cache_hits_by_tier_total")
        assert by_tier == _one_of(numbers, "vllm:prefix_cache_hits_total"), numbers
        self.told["storage tokens"] += int(
            _sum_of(numbers, "manyroots:prefix_cache_hits_by_tier_total", 'tier="storage"')
        )
        self.told["hit tokens"] += int(by_tier)
        self.told["retractions"] += int(_one_of(numbers, "vllm:num_preemptions_total"))
        assert not _sum_of(numbers, "manyroots:cache_self_checks_total", 'result="different"')
        await serving.client.aclose()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            _, now = self._held(serving)
            more = {what: (before[what], count) for what, count in now.items()
                    if count > before[what] + 6}  # fmt: skip
            if not more or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        assert not more, f"more is held than at first: {more}"

    async def _compare(self) -> None:
        cold = Serving(self.world, self.folder, [
            "--max-num-seqs", "1", "--max-num-batched-tokens", str(MAX_LEN),
            "--no-enable-prefix-caching", "--max-loras", str(len(CONTENTS)),
            "--kv-cache-memory-bytes",
            str(4 * MAX_LEN * self.world.page_bytes + 8 * self.world.state_bytes),
        ])  # fmt: skip
        try:
            await cold.ready()
            for content in CONTENTS:
                body = {"lora_name": content, "lora_path": self.world.adapter(content)}
                answer = await cold.admin("/v1/load_lora_adapter", body)
                assert answer.status_code == 200, answer.text
            wrong: dict[int, str] = {}
            for weights in WEIGHTS:
                await cold.update(weights, aborts=False)
                await self._compare_with(cold, weights, wrong)
            assert not wrong, f"{len(wrong)} are wrong: " + "\n".join(list(wrong.values())[:3])
        finally:
            await cold.stop()

    async def _compare_with(self, cold: Serving, weights: str, wrong: dict[int, str]) -> None:
        """`wrong`: what agrees with none of the weights that it may have been computed with."""
        for number, (_, asked) in enumerate(self.asked):
            if weights == WEIGHTS[0]:
                self._count(asked)
            if asked.choices is None or weights not in asked.weights:
                continue
            if number in wrong or weights == min(asked.weights):
                wrong.pop(number, None)
                told = [await self._differs(cold, asked, content) for content in asked.contents]
                if all(told):
                    wrong[number] = f"{told}: {asked}"

    def _count(self, asked: Asked) -> None:
        self.told["requests"] += 1
        if asked.status not in (0, 200):
            self.told["errors"] += 1
            assert asked.may_fail, f"nothing was done to it: {asked}"
            assert asked.status in (-1, 503, 500, 400), asked
        details = asked.usage.get("prompt_tokens_details") or {}
        assert details.get("cached_tokens", 0) <= asked.usage.get("prompt_tokens", 0), asked

    async def _differs(self, cold: Serving, asked: Asked, content: str | None) -> str | None:
        """What is not as it is from the cold server; None if all is."""
        answer = await cold.client.post(
            "/v1/completions", json=asked.body | {"model": content or MODEL}
        )
        assert answer.status_code == 200, answer.text
        self.told["compared"] += 1
        assert asked.choices is not None
        for ours, theirs in zip(asked.choices, answer.json()["choices"], strict=True):
            if why := _difference(ours, theirs):
                if asked.may_fail and ours.get("finish_reason") in ("abort", None):
                    continue
                if await self._is_near_tie(cold, asked, content, ours, theirs):
                    self.told["near ties"] += 1
                    continue
                return why
        return None

    async def _is_near_tie(
        self, cold: Serving, asked: Asked, content: str | None, ours: Any, theirs: Any
    ) -> bool:
        """Another token is right only where rounding may choose."""
        at = _parting(ours["token_ids"], theirs["token_ids"])
        if at is None:
            return False
        tokens = ours["token_ids"][: at + 1]
        for more in hairs(tokens[at], theirs["token_ids"][at]):
            biases = {str(token): by for token, by in more.items()}
            body = asked.body | {"model": content or MODEL, "logit_bias": biases}
            choices = (await cold.client.post("/v1/completions", json=body)).json()["choices"]
            if choices[ours["index"]]["token_ids"][: at + 1] == tokens:
                return True
        return False


def hairs(ours: int, theirs: int) -> Iterator[dict[int, float]]:
    """Two answers part. If rounding did it, one of these biases does it, too: a hair more weight
    for our token and all on its side of the other (a draw is a place in the sum by id)."""
    side = range(ours + 1) if ours < theirs else range(ours, VOCAB)
    for part in (1, 10, 100):  # smaller ones, too: larger ones may reach earlier tokens
        yield dict.fromkeys(side, CLOSE / part)


def _parting(ours: list[int], theirs: list[int]) -> int | None:
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return at
    return None


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)!r}, and {theirs.get(name)!r} cold"
    mine, other = ours.get("logprobs") or {}, theirs.get("logprobs") or {}
    for name in ("tokens", "text_offset"):
        if mine.get(name) != other.get(name):
            return f"{name} are {mine.get(name)}, and {other.get(name)} cold"
    pairs = zip(mine.get("token_logprobs", []), other.get("token_logprobs", []), strict=True)
    for one, two in pairs:
        if (one is None) != (two is None):
            return f"a log-probability is {one}, and {two} cold"
        if one is not None and abs(one - two) > CLOSE * max(1.0, abs(two)):
            return f"a log-probability is {one}, and {two} cold"
    return None


def _is_quiet(numbers: dict[str, float]) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "manyroots:pages_held",
             "manyroots:adapter_running", "manyroots:adapter_loading")  # fmt: skip
    return all(_one_of(numbers, name) == 0 for name in names)


def _one_of(numbers: dict[str, float], name: str) -> float:
    found = [value for key, value in numbers.items() if key.partition("{")[0] == name]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def _sum_of(numbers: dict[str, float], name: str, label: str = "") -> float:
    return sum(
        value for key, value in numbers.items() if key.partition("{")[0] == name and label in key
    )


def run_seed(seed: int, num_requests: int = NUM_REQUESTS) -> tuple[dict[str, int], str | None]:
    """One storm: counts, and what was wrong."""
    storm = None
    try:
        storm = Storm(seed)
        asyncio.run(storm.run(num_requests))
    except Exception:
        logs = [s.server.log()[-1500:] for s in storm.servings] if storm else []
        return {}, traceback.format_exc() + "\n".join(logs)
    finally:
        if storm is not None:
            for serving in storm.servings:
                serving.server.stop()
            if storm.redis is not None:
                storm.redis.stop()
            shutil.rmtree(storm.folder, ignore_errors=True)
    return dict(storm.told), None


def main(argv: list[str] | None = None) -> int:
    what = "tests.soaks.served_storms"
    return command(what, run_seed, "requests", description=__doc__, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
