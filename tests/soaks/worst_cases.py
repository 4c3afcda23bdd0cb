"""The worst bodies of every field of every route: one request must not stop a server (R03).

    python -m tests.soaks.worst_cases [http] --bodies N [--seed S] [--state FILE] [--limit-s S]
        [--jobs N]

Each seed is one body: a route of the server's own OpenAPI document, a usual request, and one or two
fields that are long, wide, deep, repeated or hostile to a parser. Without `http` the server is a
real one but for its engine and runs in this process; with it, it is `manyroots serve` with a tiny
model, one for each of `--jobs`. While a body is on its way, `/live` is asked again and again. What
must hold:

- the answer is a 4xx with a message, or good; the processes live on;
- `/live` answers before the API process has used 100 ms more of processor time, in all threads;
- neither the API's memory nor the engine's grows beyond a bound.

The totals say how many bodies left `/live` within how much processor time. Without `http` it needs
neither torch, transformers, pydantic, pytest nor the OpenAI client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.helpers.patience import PATIENCE_S
from tests.soaks.bodies import USUAL
from tests.soaks.slices import command
from tests.unit.api.harness import Harness

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

LIVE_CPU_S = 0.1
LIVE_CLASSES_MS = (1, 10, 50, 100)
MAX_GROWTH_BYTES = 1 << 30
_MAX_BYTES = (8 << 20) - 4096
Make = Callable[[random.Random, int], Any]
"""A value of about so many bytes."""


def _chain(size: int, link: Callable[[str], Any]) -> Any:
    num = max(1, size // 60)
    definitions = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(num)}
    return {"$defs": {**definitions, f"d{num}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = {"type": "null"}
    for _ in range(min(depth, 300)):
        value = wrap(value)
    return value


def _rules(size: int, sign: str) -> str:
    num = max(1, size // 16)
    chain = "\n".join(f'r{i}{sign} "a" r{i + 1}' for i in range(num))
    return f'start{sign} r0\nroot{sign} r0\n{chain}\nr{num}{sign} "b"'


def _message(rng: random.Random, size: int) -> Any:
    role = rng.choice(("user", "assistant", "system", "tool", "x" * size))
    content: Any = rng.choice(
        ("x" * size, [{"type": "text", "text": "a"}] * (size // 30), None, "")
    )
    return {"role": role, "content": content}


def _tool(rng: random.Random, size: int) -> Any:
    function = {
        "name": "f" * rng.choice((1, 3, 3, size)),
        "parameters": rng.choice(SCHEMAS)(rng, size),
    }
    return {"type": "function", "function": function}


SCHEMAS: tuple[Make, ...] = (
    lambda rng, size: _chain(size, lambda to: {"type": "array", "items": {"$ref": to}}),
    lambda rng, size: _chain(size, lambda to: {"properties": {"a": {"$ref": to}}}),
    lambda rng, size: _chain(size, lambda to: {"anyOf": [{"$ref": to}, {"$ref": "#"}]}),
    lambda rng, size: _chain(size, lambda to: {"allOf": [{"$ref": to}]}),
    lambda rng, size: {"properties": {f"p{i}": {"type": "integer"} for i in range(size // 24)}},
    lambda rng, size: {"properties": {f"p{i}": {} for i in range(size // 24)},
                       "required": [f"p{i}" for i in range(size // 24)]},
    lambda rng, size: {"enum": [f"e{i}" for i in range(size // 10)]},
    lambda rng, size: {"oneOf": [{"const": i} for i in range(size // 14)]},
    lambda rng, size: {"anyOf": [{"properties": {f"p{i}": {}}} for i in range(size // 30)]},
    lambda rng, size: {"type": "string", "pattern": "(a?)" * (size // 4) + "b{1,900}"},
    lambda rng, size: {"type": "string", "maxLength": size * 1000, "pattern": "^(a|b)*$"},
    lambda rng, size: {"type": "array", "minItems": size, "items": {"type": "integer"}},
    lambda rng, size: {"type": "array", "prefixItems": [{"type": "null"}] * (size // 18)},
    lambda rng, size: {"patternProperties": {f"^p{i}": {} for i in range(size // 14)}},
    lambda rng, size: _nested(size // 20, lambda inner: {"type": "array", "items": inner}),
    lambda rng, size: _nested(size // 30, lambda inner: {"properties": {"a": inner}}),
    lambda rng, size: {"$ref": "#" + "/x" * (size // 2)},
    lambda rng, size: {"description": "x" * size, "type": "object"},
)  # fmt: skip
TEXTS: tuple[Make, ...] = (
    lambda rng, size: "x" * size,
    lambda rng, size: '\u00e4\U0001f33f\n"\\' * (size // 12),
    lambda rng, size: " " * size,
    lambda rng, size: "".join(rng.choices("abc \x00{}[],:<|>", k=min(size, 20_000))),
    lambda rng, size: "a " * (size // 2),
    lambda rng, size: _rules(size, ":"),
    lambda rng, size: _rules(size, " ::="),
    lambda rng, size: "start: " + "(" * (size // 2) + '"a"' + ")" * (size // 2),
    lambda rng, size: "start: " + " | ".join(f'"a{i}"' for i in range(size // 8)),
    lambda rng, size: "(" * (size // 2) + "a" + ")" * (size // 2),
    lambda rng, size: "(a?){900}" * min(size // 9, 50),
    lambda rng, size: "|".join(f"a{i}b*" for i in range(size // 7)),
    lambda rng, size: json.dumps(rng.choice(SCHEMAS)(rng, size)),
)
LISTS: tuple[Make, ...] = (
    lambda rng, size: [5] * (size // 3),
    lambda rng, size: list(range(size // 6)),
    lambda rng, size: [-1] * (size // 4),
    lambda rng, size: [1.0] * (size // 5),
    lambda rng, size: [10**18] * (size // 20),
    lambda rng, size: ["ab " * 85] * (size // 260 + 1),
    lambda rng, size: [f"w{i}" for i in range(size // 8)],
    lambda rng, size: [""] * (size // 4),
    lambda rng, size: [None] * (size // 6),
    lambda rng, size: [[]] * (size // 4),
    lambda rng, size: [{}] * (size // 4),
    lambda rng, size: [[5] * 64] * (size // 200 + 1),
    lambda rng, size: [{"role": "user", "content": "a"}] * (size // 34 + 1),
    lambda rng, size: [_message(rng, size)],
    lambda rng, size: [_tool(rng, size)],
    lambda rng, size: [_tool(rng, 60)] * (size // 150 + 1),
)
OBJECTS: tuple[Make, ...] = (
    *SCHEMAS,
    lambda rng, size: {f"k{i}": i for i in range(size // 10)},
    lambda rng, size: {str(i): 1 for i in range(size // 10)},
    lambda rng, size: {"x" * size: 1},
    lambda rng, size: {"json": rng.choice(SCHEMAS)(rng, size)},
    lambda rng, size: {rng.choice(("regex", "grammar")): rng.choice(TEXTS)(rng, size)},
    lambda rng, size: {"choice": [f"c{i}" for i in range(size // 8)]},
    lambda rng, size: {"type": "json_schema", "json_schema":
                       {"name": "x", "schema": rng.choice(SCHEMAS)(rng, size)}},
)  # fmt: skip
NUMBERS: tuple[Make, ...] = (
    lambda rng, size: 10 ** min(size, 4000),
    lambda rng, size: -(2**63),
    lambda rng, size: 2**31 - 1,
    lambda rng, size: 1e308,
    lambda rng, size: 128,
)
KINDS = {"string": TEXTS, "array": LISTS, "object": OBJECTS, "integer": NUMBERS, "number": NUMBERS}
ANY = (TEXTS, LISTS, LISTS, OBJECTS, OBJECTS, NUMBERS)
Routes = list[tuple[str, dict[str, list[tuple[Make, ...]]]]]
"""Paths, and of each field the kinds of values that it takes."""


def body_of(seed: int, routes: Routes, most: int) -> tuple[str, bytes]:
    """A path and a body of at most about `most` bytes."""
    rng = random.Random(seed)
    path, fields = rng.choice(routes)
    body: dict[str, Any] = {
        name: rng.choice(USUAL[name]) for name in fields if name in ("model", "messages", "input")
    }
    if "prompt" in fields and "messages" not in fields:
        body["prompt"] = rng.choice(("hi", "hi", ["hi"] * rng.choice((2, 64, 256))))
    if "max_tokens" in fields:
        body["max_tokens"] = 1
    size = int(10 ** rng.uniform(1, 0.5 + len(str(most)) - 1)) % most
    for name in rng.sample(list(fields), min(rng.choice((1, 1, 1, 2)), len(fields))):
        fitting = fields[name] if rng.random() < 0.8 else ()
        kind = rng.choice(fitting or ANY)
        body[name] = rng.choice(kind)(rng, size)
    if rng.random() < 0.03:
        body[f"unknown{seed}"] = rng.choice(LISTS)(rng, size)
    told = json.dumps(body).encode()
    if rng.random() < 0.02:
        told = rng.choice((told[: len(told) // 2], b"[" * size, told.replace(b"5", b"NaN"),
                           b'{"a":' * (size // 5), told.replace(b"x", b"\\ud800")))  # fmt: skip
    return path, told[:_MAX_BYTES]


def _kinds(schema: dict[str, Any]) -> list[tuple[Make, ...]]:
    types = {one.get("type", "object") for one in schema.get("anyOf", [schema])}
    return [KINDS[name] for name in sorted(map(str, types)) if name in KINDS]


class Asked:
    """A server, and what must hold of it while it reads the worst bodies."""

    most_bytes = 1 << 16
    """In this process bodies are small, so that a million of them end in hours."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.worst_live_s = 0.0
        """Of the last body."""

    def cpu_s(self) -> float:
        return time.process_time()

    def fault(self) -> str | None:
        """What is wrong with the processes; None if nothing is."""
        return None

    async def routes(self) -> Routes:
        document = (await self._client.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        found = []
        for path, of_path in sorted(document["paths"].items()):
            if "requestBody" in of_path.get("post", {}):
                schema = of_path["post"]["requestBody"]["content"]["application/json"]["schema"]
                name = schema.get("$ref", "").rpartition("/")[2]
                fields = sorted(schemas[name]["properties"].items())
                found.append((path, {field: _kinds(of_field) for field, of_field in fields}))
        assert found, "the document has no route that takes a body"
        return found

    async def ask(self, path: str, body: bytes) -> tuple[int, str | None]:
        """The answer's status, and what was wrong."""
        asked = asyncio.create_task(self._client.post(path, content=body))
        done, faults = False, []
        self.worst_live_s = 0.0
        answered = self.cpu_s()
        while not done:
            done = asked.done()
            begin = self.cpu_s()
            live = await self._client.get("/live")
            # In this process nothing is asked while the loop is blocked: that shows before `begin`.
            used_s = max(begin - answered, (answered := self.cpu_s()) - begin)
            self.worst_live_s = max(self.worst_live_s, used_s)
            if live.status_code != 200 or used_s > LIVE_CPU_S:
                faults.append(f"/live is {live.status_code} after {used_s:.3f} s of processor time")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asked), 0.005)
        answer = asked.result()
        if answer.status_code >= 500:
            faults.append(f"{answer.status_code} {answer.text[:200]}")
        elif answer.status_code >= 400 and not answer.json().get("error", {}).get("message"):
            faults.append(f"{answer.status_code} without a message")
        if why := self.fault():
            faults.append(why)
        return answer.status_code, "; ".join(faults) or None


class AskedOverHttp(Asked):
    """`manyroots serve` with a tiny model."""

    most_bytes = _MAX_BYTES

    def __init__(self, server: Server) -> None:
        from tests.e2e.conftest import HEADERS  # needs what the validators' part does not

        client = httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=PATIENCE_S)
        super().__init__(client)
        self._server = server
        self._pids = self.pids()
        self._bytes = self.memory()

    def pids(self) -> list[int]:
        return [self._server.api_pid, *self._server.children()]

    def memory(self) -> list[int]:
        return [
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in self.pids()
        ]

    def cpu_s(self) -> float:
        threads = Path(f"/proc/{self._pids[0]}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def fault(self) -> str | None:
        if self.pids() != self._pids:
            return f"the processes were {self._pids} and are {self.pids()}"
        grown = max(now - then for now, then in zip(self.memory(), self._bytes, strict=True))
        return f"a process has grown by {grown} bytes" if grown > MAX_GROWTH_BYTES else None


class _Run:
    """One loop and one server for all seeds of this process."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._loop = asyncio.new_event_loop()
        self._routes = self._loop.run_until_complete(asked.routes())

    def seed(self, seed: int) -> tuple[dict[str, int], str | None]:
        path, body = body_of(seed, self._routes, self.asked.most_bytes)
        status, why = self._loop.run_until_complete(self.asked.ask(path, body))
        live_ms = self.asked.worst_live_s * 1000
        most_ms = next((most for most in LIVE_CLASSES_MS if live_ms <= most), None)
        counts = {
            "bodies": 1,
            "bytes": len(body),
            f"answered {status // 100}xx": 1,
            f"/live {f'within {most_ms}' if most_ms else f'beyond {LIVE_CLASSES_MS[-1]}'} ms": 1,
        }
        return counts, None if why is None else f"POST {path} {body[:300]!r}: {why}"


@cache
def _in_process() -> _Run:
    return _Run(Asked(Harness().client))


def run_seed(seed: int) -> tuple[dict[str, int], str | None]:
    """One body at the validators, in this process."""
    return _in_process().seed(seed)


@cache
def _over_http() -> _Run:
    from tests.helpers.tiny_server import tiny_server

    context = tiny_server()
    run = _Run(AskedOverHttp(context.__enter__()))
    # Not atexit: the processes of a pool end without it.
    Finalize(None, context.__exit__, (None, None, None), exitpriority=10)
    return run


def run_seed_over_http(seed: int) -> tuple[dict[str, int], str | None]:
    """One body at this process's server."""
    return _over_http().seed(seed)


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["http"]:
        name, run, argv, num_seeds = "worst_cases http", run_seed_over_http, words[1:], 10
    else:
        name, run, argv, num_seeds = "worst_cases", run_seed, words, 100
    what = f"tests.soaks.{name}"
    return command(what, run, "bodies", description=__doc__, argv=argv, seeds_per_slice=num_seeds)


if __name__ == "__main__":
    sys.exit(main())
