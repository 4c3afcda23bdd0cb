"""`bench routing`: what routing gives to conversations with adapters, served and simulated.

Makes conversations with many adapters, and replicas whose pools together hold half of what they
need. Serves them over HTTP twice, by expected time to the first token and by round robin. Then
simulates each run: the same requests at the moments when they were sent, with the costs that were
measured on the server. Gives hit rates, adapter loads and queues of both, and how far they differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manyroots.bench.http_cost import NAME, ServerProcess, started_server
from manyroots.bench.http_stream import HttpStreamError, HttpStreams
from manyroots.bench.machine import describe_machine
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.bench.spread import percentile
from manyroots.config import engine_settings
from manyroots.models.source import resolve_source
from manyroots.routing.router import RoutingPolicy
from manyroots.simulate.costs import CostModel
from manyroots.simulate.replicas import simulate_replicas
from manyroots.simulate.segments import segment_tokens
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import simulate
from manyroots.simulate.summary import summarize
from manyroots.simulate.trace import Trace, TraceRequest, TraceSegment

POLICIES = (RoutingPolicy.EXPECTED_TTFT, RoutingPolicy.ROUND_ROBIN)
HIT_RATE_FACTOR, ONE_POOL_SHARE, LOADS_SHARE, QUEUE_RATIO, POINTS = 1.5, 0.95, 0.3, 1.3, 0.05
"""The goals: of hit rates over round robin's or one pool's, of adapter loads over round robin's, of
the longest queue over the mean, and of served figures beside simulated ones."""
_FIRST_TOKEN, _NUM_TOKENS = 100, 156
"""Low tokens, which every model has; lower ones are often special."""
_ADMIN_KEY = "bench"
_RANK = 8
_PROBES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingWorkload:
    """Conversations, and the replicas that answer them."""

    num_replicas: int = 3
    num_adapters: int = 30
    num_conversations: int = 90
    turns: tuple[int, int] = (2, 8)
    system_tokens: tuple[int, int]
    """Of an adapter's system prompt."""
    question_tokens: tuple[int, int]
    output_tokens: int = 6
    concurrency: int = 6
    """Requests at a time."""
    pool_share: float = 0.5
    """Of the working set: what the pools of all replicas hold together."""
    page_size: int = 16
    max_loras: int = 8
    max_cpu_loras: int = 16
    seed: int = 0

    def trace(self) -> Trace:
        """Turns in an order: conversations overlap, as if each began within 12 s and had 2 s
        between turns. Answers have names, by which later turns have them."""
        rng = random.Random(self.seed)
        systems = [
            TraceSegment(f"system-{i}", rng.randint(*self.system_tokens))
            for i in range(self.num_adapters)
        ]
        lines = []
        for number in range(self.num_conversations):
            adapter = rng.randrange(self.num_adapters)
            said, arrival_s = [systems[adapter]], rng.uniform(0.0, 12.0)
            for turn in range(rng.randint(*self.turns)):
                length = rng.randint(*self.question_tokens)
                said.append(TraceSegment(f"{number}/question-{turn}", length))
                reply = TraceSegment(f"{number}/answer-{turn}", self.output_tokens)
                lines.append(
                    TraceRequest(
                        arrival_s=arrival_s, prompt=tuple(said), adapter=f"adapter-{adapter}",
                        salt=None, output_tokens=reply.length, reply=reply.name,
                    )
                )  # fmt: skip
                said.append(reply)
                arrival_s += rng.expovariate(1 / 2)
        return tuple(sorted(lines, key=lambda line: line.arrival_s))

    def working_set_pages(self) -> int:
        """Of all prompts, with what they share counted once."""
        parts = {(line.adapter, part) for line in self.trace() for part in segments(line)}
        return sum(part.length for _, part in parts) // self.page_size

    def longest_tokens(self) -> int:
        """Of a prompt and its answer."""
        return max(line.num_prompt_tokens + line.output_tokens for line in self.trace())

    @property
    def pages_per_replica(self) -> int:
        return int(self.working_set_pages() * self.pool_share) // self.num_replicas

    def simulation(self) -> SimulationSettings:
        """Of one replica."""
        return SimulationSettings(
            block_size=self.page_size,
            num_pages=self.pages_per_replica,
            max_loras=self.max_loras,
            max_cpu_loras=self.max_cpu_loras,
        )


@dataclass(frozen=True, slots=True)
class RoutingFigures:
    """What one run gave."""

    hit_rate: float
    adapter_loads: int
    queue_ratio: float
    """The longest mean queue of a replica over the mean of all."""


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A served run: its figures, the requests as they were sent, and what things took."""

    figures: RoutingFigures
    trace: Trace
    costs: CostModel


def segments(line: TraceRequest) -> list[TraceSegment]:
    """A prompt's parts, each with a name."""
    return [part for part in line.prompt if isinstance(part, TraceSegment)]


def run_routing(workload: RoutingWorkload, engine: dict[str, Any]) -> dict[str, Any]:
    """Serve and simulate; prints a table and gives the report."""
    runs = {policy: serve(workload, engine, policy) for policy in POLICIES}
    served = {policy: run.figures for policy, run in runs.items()}
    simulated = {policy: simulate_served(workload, run, policy) for policy, run in runs.items()}
    ours = runs[RoutingPolicy.EXPECTED_TTFT]
    settings = workload.simulation()
    assert settings.num_pages is not None
    whole = replace(settings, num_pages=settings.num_pages * workload.num_replicas, max_loras=0)
    one_pool = summarize(simulate(ours.trace, whole, ours.costs, seed=0)).all.hit_rate
    report: dict[str, Any] = {
        "bench": "routing",
        "engine": engine,
        "workload": asdict(workload),
        "machine": describe_machine(),
        "requests": len(ours.trace),
        "working_set_pages": workload.working_set_pages(),
        "pages_per_replica": workload.pages_per_replica,
        "served": {policy.value: asdict(found) for policy, found in served.items()},
        "simulated": {policy.value: asdict(found) for policy, found in simulated.items()},
        "simulated_one_pool_hit_rate": one_pool,
        "costs": {policy.value: asdict(run.costs) for policy, run in runs.items()},
        "goals": goals(served, simulated, one_pool),
    }
    _show(report)
    return report


def goals(
    served: dict[RoutingPolicy, RoutingFigures],
    simulated: dict[RoutingPolicy, RoutingFigures],
    one_pool: float,
) -> dict[str, dict[str, Any]]:
    """Each goal with its figure, its bound and whether it is met."""
    found: dict[str, dict[str, Any]] = {}
    for kind, figures in (("served", served), ("simulated", simulated)):
        ours, rotated = (figures[policy] for policy in POLICIES)
        least = min(HIT_RATE_FACTOR * rotated.hit_rate, ONE_POOL_SHARE * one_pool)
        most_loads = LOADS_SHARE * rotated.adapter_loads
        found[f"{kind} hit rate"] = _goal(ours.hit_rate, least, ours.hit_rate >= least)
        found[f"{kind} adapter loads"] = _goal(
            ours.adapter_loads, most_loads, ours.adapter_loads <= most_loads
        )
        found[f"{kind} longest queue"] = _goal(
            ours.queue_ratio, QUEUE_RATIO, ours.queue_ratio <= QUEUE_RATIO
        )
    for policy in POLICIES:
        apart = abs(served[policy].hit_rate - simulated[policy].hit_rate)
        found[f"hit rates apart, {policy.value}"] = _goal(apart, POINTS, apart <= POINTS)
    shares = [_loads_share(figures) for figures in (served, simulated)]
    apart = abs(shares[0] - shares[1])
    found["loads shares apart"] = _goal(apart, POINTS, apart <= POINTS)
    return found


def _loads_share(figures: dict[RoutingPolicy, RoutingFigures]) -> float:
    """Adapter loads over round robin's."""
    ours, rotated = (figures[policy].adapter_loads for policy in POLICIES)
    return ours / max(1, rotated)


def _goal(value: float, bound: float, is_met: bool) -> dict[str, Any]:
    return {"value": round(value, 4), "bound": round(bound, 4), "is_met": is_met}


def simulate_served(
    workload: RoutingWorkload, run: ServedRun, policy: RoutingPolicy
) -> RoutingFigures:
    """The requests of a served run, when they were sent, on a machine with its costs."""
    found = simulate_replicas(
        run.trace, workload.simulation(), run.costs,
        num_replicas=workload.num_replicas, policy=policy, seed=0,
    )  # fmt: skip
    summary = summarize(found.merged)
    loads = sum(summary.num_adapter_loads.values())
    return RoutingFigures(summary.all.hit_rate, loads, found.queue_ratio)


def serve(workload: RoutingWorkload, engine: dict[str, Any], policy: RoutingPolicy) -> ServedRun:
    """Start the replicas, and send them the trace."""
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as home:
        targets = targets_of(resolve_source(engine_settings(engine).model))
        folders = write_adapters(targets, Path(home), workload.num_adapters, _RANK)
        settings = {
            **engine,
            "block_size": workload.page_size,
            "num_gpu_blocks_override": workload.pages_per_replica,
            "max_model_len": workload.longest_tokens(),
            "enable_lora": True,
            "max_loras": workload.max_loras,
            "max_cpu_loras": workload.max_cpu_loras,
            "max_lora_rank": _RANK,
            "lora_modules": [f"adapter-{i}={folder}" for i, folder in enumerate(folders)],
            "replicas": workload.num_replicas,
            "routing_policy": policy.value,
            "admin_key": _ADMIN_KEY,
        }
        with started_server(settings) as server:
            return asyncio.run(_Callers(server, workload).run())


class _Callers:
    """All conversations at one server."""

    def __init__(self, server: ServerProcess, workload: RoutingWorkload) -> None:
        self._workload = workload
        self._url = server.url
        self._streams = HttpStreams(server.url, None)
        self._admin = HttpStreams(server.url, _ADMIN_KEY)
        self._begin_s = 0.0
        self._sent: list[TraceRequest] = []
        self._num_open: list[list[int]] = []
        """Of each replica, whenever a request is about to be sent."""
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._answers: dict[str, list[int]] = {}
        """What the model said, by the names that later turns have for it."""
        self._step_s: list[float] = []
        """Seconds of each request, by its number of tokens."""

    async def run(self) -> ServedRun:
        try:
            token_s = await self._token_s()
            before = await self._replicas()
            self._begin_s = time.perf_counter()
            await self._send_all()
            after = await self._replicas()
        finally:
            self._streams.close()
            self._admin.close()
        given = [
            later["num_requests"] - earlier["num_requests"]
            for earlier, later in zip(before, after, strict=True)
        ]
        # A queue as a request finds it, and the request itself: as the simulator counts.
        mean_open = [
            statistics.mean(seen) + own / len(self._sent)
            for seen, own in zip(zip(*self._num_open, strict=True), given, strict=True)
        ]
        loads, times = _adapter_loads(self._url)
        figures = RoutingFigures(
            hit_rate=self._num_cached_tokens / self._num_prompt_tokens,
            adapter_loads=loads,
            queue_ratio=max(mean_open) / statistics.mean(mean_open),
        )
        # Slower requests had waited: for an adapter, or for other requests.
        step_s = percentile(self._step_s, 0.25)
        return ServedRun(figures, tuple(self._sent), _costs(token_s, step_s, times))

    async def _send_all(self) -> None:
        """In the order of the trace, each when the turn before it has been answered and fewer than
        `concurrency` are open. So the order does not depend on the speed of the machine."""
        ended: dict[str, asyncio.Task[None]] = {}
        """By the answer's name."""
        is_free = asyncio.Semaphore(self._workload.concurrency)
        for line in self._workload.trace():
            before = [ended[part.name] for part in segments(line) if part.name in ended]
            if before:
                await before[-1]
            await is_free.acquire()
            self._num_open.append([view["num_open"] for view in await self._replicas()])
            self._sent.append(replace(line, arrival_s=time.perf_counter() - self._begin_s))
            assert line.reply is not None
            task = ended[line.reply] = asyncio.create_task(self._send(line))
            task.add_done_callback(lambda _: is_free.release())
        await asyncio.gather(*ended.values())

    async def _send(self, line: TraceRequest) -> None:
        prompt: list[int] = []
        for part in segments(line):
            prompt += self._answers.get(part.name) or _tokens(part)
        begin = time.perf_counter()
        answer = await self._ask(line.adapter, prompt, line.output_tokens)
        self._step_s.append((time.perf_counter() - begin) / line.output_tokens)
        assert line.reply is not None
        self._answers[line.reply] = answer["choices"][0]["token_ids"]
        usage = answer["usage"]
        self._num_prompt_tokens += usage["prompt_tokens"]
        self._num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    async def _ask(
        self, adapter: str | None, prompt: list[int], num_tokens: int, **more: Any
    ) -> dict[str, Any]:
        body = {
            "model": adapter or NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        answer = (await self._streams.post("/v1/completions", body)).events[-1][1]
        if len(answer["choices"][0]["token_ids"]) != num_tokens:
            raise HttpStreamError(f"asked for {num_tokens} tokens, and got others.")
        return answer

    async def _replicas(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = (await self._admin.get("/v1/replicas"))["data"]
        return listed

    async def _token_s(self) -> float:
        """What a prompt token takes: the difference of long and short prompts, one at a time."""
        lengths = (1, self._workload.longest_tokens() - 1)
        took: dict[int, list[float]] = {length: [] for length in lengths}
        for number in range(-1, _PROBES):
            for length in lengths:
                prompt = _tokens(TraceSegment(f"probe-{number}", length))
                begin = time.perf_counter()
                await self._ask(None, prompt, 1)
                if number >= 0:  # the first one warms up
                    took[length].append(time.perf_counter() - begin)
        await self._admin.post("/reset_prefix_cache", {})
        short_s, long_s = (statistics.median(took[length]) for length in lengths)
        return max(1e-6, (long_s - short_s) / (lengths[1] - lengths[0]))


def _tokens(part: TraceSegment) -> list[int]:
    """A segment in tokens of the model."""
    tokens: list[int] = (segment_tokens(part.name, part.length) % _NUM_TOKENS).tolist()
    return [_FIRST_TOKEN + token for token in tokens]


def _adapter_loads(url: str) -> tuple[int, dict[str, float]]:
    """Loads to the device, and the mean seconds of each kind by source and target."""
    with contextlib.closing(urllib.request.urlopen(f"{url}/metrics", timeout=60)) as page:
        lines = page.read().decode().splitlines()
    loads, sums, counts = 0, {}, {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name.startswith("manyroots:adapter_loads_total"):
            loads += int(float(value))
        elif name.startswith("manyroots:adapter_load_seconds_sum"):
            sums[name.partition("{")[2]] = float(value)
        elif name.startswith("manyroots:adapter_load_seconds_count"):
            counts[name.partition("{")[2]] = float(value)
    return loads, {labels: sums[labels] / count for labels, count in counts.items() if count}


def _costs(token_s: float, step_s: float, load_s: dict[str, float]) -> CostModel:
    """What the server took, as the simulator takes it. `load_s`: of adapters, by the metric's
    labels."""
    by_way = {
        way: seconds
        for labels, seconds in load_s.items()
        for way in (("storage", "host"), ("storage", "device"), ("host", "device"))
        if f'source="{way[0]}"' in labels and f'target="{way[1]}"' in labels
    }
    host_s = by_way.get(("host", "device"), 0.0)
    storage_s = by_way.get(("storage", "device"), by_way.get(("storage", "host"), 0.0) + host_s)
    return CostModel(
        step_overhead_s=step_s, unoverlapped_step_s=0.0,
        prefill_tokens_per_s=1 / token_s, prefill_pair_s=0.0,
        decode_row_s=0.0, decode_context_token_s=0.0, kv_bytes_per_token=1.0, kv_memory_bytes=1.0,
        host_bytes_per_s=1e12, host_latency_s=host_s, storage_bytes_per_s=1e12,
        storage_latency_s=0.0, adapter_bytes=1.0, adapter_storage_load_s=storage_s,
    )  # fmt: skip


def _show(report: dict[str, Any]) -> None:
    print(f"{report['requests']} requests; pools of {report['pages_per_replica']} pages, of "
          f"{report['working_set_pages']} in all")  # fmt: skip
    print(f"{'':24}{'hit rate':>10}{'loads':>8}{'queue ratio':>13}")
    for kind in ("served", "simulated"):
        for policy, found in report[kind].items():
            print(f"{kind + ', ' + policy:24}{100 * found['hit_rate']:9.1f}%"
                  f"{found['adapter_loads']:8}{found['queue_ratio']:13.2f}")  # fmt: skip
    for name, goal in report["goals"].items():
        print(f"{name:36}{goal['value']:10.3f}  goal {goal['bound']:10.3f}  "
              f"{'met' if goal['is_met'] else 'MISSED'}")  # fmt: skip
    print(json.dumps({key: report[key] for key in ("served", "simulated", "goals")}))
