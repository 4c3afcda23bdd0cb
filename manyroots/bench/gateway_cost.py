"""`manyroots bench gateway`: what a gateway adds to one server with one engine.

Starts three servers on loopback with equal settings and one engine each: without a gateway, with a
gateway in the API process (`--replicas`), and with the router in a process of its own
(`--gateways 2`). One stream at a time gives the time to the first token: each prompt goes to all
servers, one after the other in an order that rotates, and what a gateway adds is the median of the
differences. So other work on the machine slows all of them. Many streams at once give the processor
time per token, of all processes of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyroots.bench.http_cost import NAME, ServerProcess, processor_s_of, started_server
from manyroots.bench.http_stream import HttpStreamError, HttpStreams
from manyroots.bench.machine import describe_machine
from manyroots.bench.spread import spread

_NEVER_S = 86400.0
KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    # A second replica may be added, and never is: so there is a gateway, with one engine.
    "gateway": {"max_replicas": 2, "upscale_delay_s": _NEVER_S},
    "router process": {"gateways": 2},
}
"""Settings of each server beside the engine's."""
_FIRST_TOKEN = 100
"""Prompts have no lower one: they are often special."""


@dataclass(frozen=True, slots=True)
class GatewayWorkload:
    """What is sent to each server."""

    num_first: int
    """Requests one after the other."""
    streams: int
    """Requests at once."""
    prompt_len: int
    output_len: int
    repeats: int
    vocab_size: int = 256
    """Low tokens, which every model has."""


def run_gateway(workload: GatewayWorkload, engine: dict[str, Any]) -> dict[str, Any]:
    """Measure all servers; prints a table and gives the report."""
    rng = random.Random(0)
    first_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    token_us: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with contextlib.ExitStack() as stack:
        servers = {
            kind: stack.enter_context(started_server({**engine, **more}))
            for kind, more in KINDS.items()
        }
        for turn in range(-1, workload.repeats):
            prompts = _prompts(workload, rng)
            firsts, per_token_s = asyncio.run(_turn(servers, workload, prompts))
            if turn >= 0:  # the first one warms up
                for kind in KINDS:
                    first_ms[kind] += [1e3 * seconds for seconds in firsts[kind]]
                    token_us[kind].append(1e6 * per_token_s[kind])
    report: dict[str, Any] = {
        "bench": "gateway",
        "engine": engine,
        "workload": asdict(workload),
        "machine": describe_machine(),
        "servers": {
            kind: {
                "first_token_p50_ms": round(statistics.median(first_ms[kind]), 3),
                "processor_us_per_token": spread(token_us[kind], 1),
                **_added(kind, first_ms, token_us),
            }
            for kind in KINDS
        },
    }
    _show(report)
    return report


def _added(
    kind: str, first_ms: dict[str, list[float]], token_us: dict[str, list[float]]
) -> dict[str, float]:
    """Beside the server without a gateway; first tokens prompt by prompt."""
    pairs = zip(first_ms[kind], first_ms["alone"], strict=True)
    firsts = statistics.median(own - alone for own, alone in pairs)
    tokens = statistics.median(token_us[kind]) / statistics.median(token_us["alone"]) - 1
    return {"added_first_token_p50_ms": round(firsts, 3), "added_processor_share": round(tokens, 4)}


def _prompts(workload: GatewayWorkload, rng: random.Random) -> list[list[int]]:
    count = workload.num_first + workload.streams
    return [
        [rng.randrange(_FIRST_TOKEN, workload.vocab_size) for _ in range(workload.prompt_len)]
        for _ in range(count)
    ]


async def _turn(
    servers: dict[str, ServerProcess], workload: GatewayWorkload, prompts: list[list[int]]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Of each server: seconds to the first token of each request alone, and processor seconds per
    token of many."""
    streams = {kind: HttpStreams(server.url, None) for kind, server in servers.items()}
    firsts: dict[str, list[float]] = {kind: [] for kind in servers}
    per_token_s: dict[str, float] = {}
    kinds = list(servers)
    try:
        for number, prompt in enumerate(prompts[: workload.num_first]):
            first = number % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                firsts[kind].append(await _first_s(streams[kind], prompt, 2))
        many = prompts[workload.num_first :]
        for kind, server in servers.items():
            before = _all_processor_s(server.pid)
            asked = (_first_s(streams[kind], prompt, workload.output_len) for prompt in many)
            await asyncio.gather(*asked)
            taken_s = _all_processor_s(server.pid) - before
            per_token_s[kind] = taken_s / (len(many) * workload.output_len)
    finally:
        for each in streams.values():
            each.close()
    return firsts, per_token_s


async def _first_s(streams: HttpStreams, prompt: list[int], num_tokens: int) -> float:
    """Seconds to the first token of a request, when all of it has been answered."""
    answer = await streams.post(
        "/v1/completions",
        {
            "model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        },
    )  # fmt: skip
    if answer.events[-1][1]["usage"]["completion_tokens"] != num_tokens:
        raise HttpStreamError(f"asked for {num_tokens} tokens, and got others.")
    return next(at for at, event in answer.events if event.get("choices")) - answer.sent_s


def _all_processor_s(pid: int) -> float:
    """Of a process and all that it has started."""
    total = processor_s_of(pid) or 0.0
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            total += sum(_all_processor_s(int(child)) for child in listed.read_text().split())
    return total


def _show(report: dict[str, Any]) -> None:
    print(f"{'server':16}{'first token p50':>18}{'added':>12}{'cpu per token':>16}{'added':>10}")
    for kind, found in report["servers"].items():
        print(
            f"{kind:16}{found['first_token_p50_ms']:15.2f} ms"
            f"{found['added_first_token_p50_ms']:9.2f} ms"
            f"{found['processor_us_per_token']['median']:13.0f} us"
            f"{100 * found['added_processor_share']:9.1f}%"
        )
