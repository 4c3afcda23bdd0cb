"""Generated bodies for every route of the server's own OpenAPI document: no 5xx, no hang (G11).

    python -m tests.soaks.bodies [--seeds 0:1000000] [--state FILE] [--real]

Each seed is one request: a route, and a body drawn from the document's schema in which values are
odd now and then, left out, or of another type. The server is a real one but for its engine, which
repeats prompts; with `--real` it is `manyroots serve` with a tiny model, and several requests are
under way at once. Prints a line for each request that was answered badly, and exits with 1 if there
was any. With `--state`, progress is saved there, and the same command continues from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.helpers.patience import PATIENCE_S
from tests.unit.api.harness import Harness

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

SLICE = 500
NUM_AT_ONCE = 8
MAX_DEPTH = 6
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 10**18, -(10**30), 0.5, -0.0, 1e308, "", " ", "\x00", "tiny",
    "\U0001f33f" * 40, "x" * 3000, [], [[]], [None], {}, {"": None}, {"type": "text"}, [1, "1"],
    {"a": {"b": [{"c": []}]}}, "auto", "required", "json_object", "user", [257, 300, -7],
)  # fmt: skip
WORDS = (
    "hello",
    "tiny",
    "auto",
    "none",
    "user",
    "assistant",
    "tool",
    "text",
    "a b c",
    "\u00e4\u20ac",
)
USUAL: dict[str, tuple[Any, ...]] = {
    "model": ("tiny",),
    "prompt": ("hello", ["a", "b"], [5, 6, 7]),
    "messages": ([{"role": "user", "content": "hi"}],),
    "input": ("hello", ["a", "b"], [{"role": "user", "content": "hi"}]),
    "max_tokens": (1, 3, 8),
    "stream": (True, False),
}  # fmt: skip
"""What a field mostly is, or few bodies would be taken."""


class Drawn:
    """Values that follow a schema, mostly."""

    def __init__(self, rng: random.Random, components: dict[str, Any]) -> None:
        self._rng = rng
        self._components = components
        self._share = rng.choice((0.0, 0.02, 0.1, 0.3))
        """Of values that are odd."""
        self._named = rng.choice((0.01, 0.05, 0.2))
        """Of fields that are named though they need not be."""

    def body(self, schema: dict[str, Any]) -> Any:
        if self._rng.random() < 0.02:
            return self._rng.choice(ODD)
        return self._value(schema, 0)

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        rng = self._rng
        if rng.random() < self._share:
            return rng.choice(ODD)
        if "$ref" in schema:
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        for either in ("anyOf", "oneOf"):
            if either in schema:
                return self._value(rng.choice(schema[either]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        if depth > MAX_DEPTH or kind is None:
            return rng.choice(ODD)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            items = schema.get("items") or {}
            return [self._value(items, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 4)))]
        return {
            "string": lambda: rng.choice(WORDS),
            "integer": lambda: rng.choice((0, 1, 2, 5, 20)),
            "number": lambda: rng.choice((0, 0.3, 1.0, 2.0)),
            "boolean": lambda: rng.random() < 0.5,
        }.get(kind, lambda: None)()

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, needed = self._rng, set(schema.get("required", ()))
        fields: dict[str, Any] = {}
        for name, of_field in schema.get("properties", {}).items():
            if rng.random() >= (0.98 if name in needed else self._named):
                continue
            usual = USUAL.get(name)
            if usual is not None and rng.random() < 0.8:
                fields[name] = rng.choice(usual)
            else:
                fields[name] = self._value(of_field, depth + 1)
        if rng.random() < self._share:
            fields[rng.choice(("unknown", "", "Model", "extra_body"))] = rng.choice(ODD)
        return fields


@dataclass(frozen=True, slots=True)
class Fault:
    """A request that was answered badly."""

    seed: int
    path: str
    body: Any
    why: str

    def __str__(self) -> str:
        return f"seed {self.seed}: POST {self.path} {json.dumps(self.body)[:1500]}: {self.why}"


class Bodies:
    """The routes that take a body, and a server for them."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.statuses: Counter[int] = Counter()

    async def read(self) -> None:
        """Ask the server for its document."""
        document = (await self._client.get("/openapi.json")).json()
        self._components = document["components"]["schemas"]
        self.routes = [
            (path, of_path["post"]["requestBody"]["content"]["application/json"]["schema"])
            for path, of_path in sorted(document["paths"].items())
            if "requestBody" in of_path.get("post", {})
        ]
        assert self.routes, "the document has no route that takes a body"

    async def send(self, seed: int) -> Fault | None:
        rng = random.Random(seed)
        path, schema = rng.choice(self.routes)
        body = Drawn(rng, self._components).body(schema)
        try:
            answer = await asyncio.wait_for(self._client.post(path, json=body), PATIENCE_S)
        except TimeoutError:
            return Fault(seed, path, body, "no answer")
        self.statuses[answer.status_code] += 1
        why = _fault_of(answer)
        return None if why is None else Fault(seed, path, body, why)


def _fault_of(answer: httpx.Response) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if answer.status_code >= 500:
        return f"{answer.status_code} {answer.text[:300]}"
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return None if answer.text.endswith("\n\n") else "the stream has no end"
    if answer.status_code >= 400 and not answer.json().get("error", {}).get("message"):
        return f"{answer.status_code} without a message: {answer.text[:300]}"
    return None


async def run(
    first: int, end: int, client: httpx.AsyncClient | None = None, num_at_once: int = 1
) -> tuple[list[Fault], Counter[int]]:
    """All seeds from `first` to before `end`. Without a client: a fake engine, in process."""
    bodies = Bodies(client or Harness().client)
    await bodies.read()
    seeds = iter(range(first, end))

    async def send() -> list[Fault]:
        return [fault for seed in seeds if (fault := await bodies.send(seed))]

    found = await asyncio.gather(*(send() for _ in range(num_at_once)))
    return [fault for one in found for fault in one], bodies.statuses


async def run_real(first: int, end: int, server: Server) -> tuple[list[Fault], Counter[int]]:
    from tests.e2e.conftest import HEADERS  # needs what the fake engine's part does not

    async with httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=None) as client:
        return await run(first, end, client, NUM_AT_ONCE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000000", help="first:end")
    parser.add_argument("--state", type=Path, help="where to note what is done")
    parser.add_argument("--real", action="store_true", help="a real engine with a tiny model")
    given = parser.parse_args()
    if not given.real:
        return _all_slices(given, None)
    from tests.helpers.tiny_server import tiny_server

    with tiny_server() as server:
        return _all_slices(given, server)


def _all_slices(given: argparse.Namespace, server: Server | None) -> int:
    first, end = map(int, given.seeds.split(":"))
    if given.state is not None and given.state.exists():
        first = max(first, int(given.state.read_text()))
    statuses: Counter[int] = Counter()
    num_faults = 0
    for at in range(first, end, SLICE):
        last = min(at + SLICE, end)
        ran = run(at, last) if server is None else run_real(at, last, server)
        found, of_slice = asyncio.run(ran)
        statuses += of_slice
        num_faults += len(found)
        for fault in found:
            print(fault, flush=True)
        if given.state is not None:
            given.state.write_text(str(last))
    if server is not None:
        server.wait_until_idle()  # and every page is given back
    print(json.dumps({"seeds": [first, end], "faults": num_faults, "statuses": dict(statuses)}))
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
