"""`manyroots bench serve`: HTTP load on any server of OpenAI's completions or chat.

Conversations come in at random (Poisson), in bursts, or so many at a time without a pause
(saturation). An arrival is never put off because the server or this program is late: waiting
counts from when a request was due. Every figure is the median of the repeats with its spread; a
request that fails is counted and named, and never a fast one.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from manyroots.bench.http_stream import (
    HttpStreamError,
    HttpStreams,
    StreamedAnswer,
    UnreachableError,
)
from manyroots.bench.serve_workload import Conversation, ServeWorkload
from manyroots.bench.spread import percentile, spread
from manyroots.errors import RequestError

SAID = ("content", "reasoning_content", "reasoning")
"""Under which names servers stream what a chat's model says."""
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}
WARM_UPS = 4


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How conversations come in: one of the two."""

    rate: float | None = None
    """Conversations per second, at random."""
    streams: int | None = None
    """So many conversations at any time, each followed by the next at once."""
    burst: int = 1
    """Conversations that come together, at the same mean rate."""
    load: float | None = None
    """What share the rate is of the highest that was kept up with, where it was chosen so."""

    @property
    def label(self) -> str:
        if self.streams is not None:
            return f"{self.streams} streams"
        if self.load is not None:
            return f"{self.rate:g} conversations/s, {self.load:.0%} load"
        return f"{self.rate:g} conversations/s" + (
            f" in bursts of {self.burst}" if self.burst > 1 else ""
        )

    def due_s(self, num_conversations: int, seed: int) -> list[float]:
        if self.rate is None:
            return [0.0] * num_conversations
        rng = random.Random(seed)
        due, at = [], 0.0
        for number in range(num_conversations):
            if number % self.burst == 0:
                at += rng.expovariate(self.rate / self.burst)
            due.append(at)
        return due


@dataclass(frozen=True, slots=True)
class Promise:
    """What a request must keep to count as served well."""

    first_token_s: float
    between_tokens_s: float
    """Of its own mean."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered whole."""

    first_s: float
    """From when it was due to its first text."""
    gaps_s: list[float]
    """Between events that bring text; one brings a token, or more where a server gathers them."""
    whole_s: float
    num_prompt_tokens: int
    num_output_tokens: int

    def keeps(self, promise: Promise) -> bool:
        mean = statistics.fmean(self.gaps_s) if self.gaps_s else 0.0
        return self.first_s <= promise.first_token_s and mean <= promise.between_tokens_s


def run_serve(
    url: str,
    api_key: str | None,
    workload: ServeWorkload,
    arrivals: list[Arrivals],
    promise: Promise,
    repeats: int,
    loads: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Measure every kind of arrival, and then arrivals at random at the shares `loads` of the
    highest rate that was kept up with; prints a table as it goes and gives the report."""
    return asyncio.run(_run(url, api_key, workload, arrivals, promise, repeats, loads))


async def _run(
    url: str,
    api_key: str | None,
    workload: ServeWorkload,
    arrivals: list[Arrivals],
    promise: Promise,
    repeats: int,
    loads: tuple[float, ...],
) -> dict[str, Any]:
    streams = HttpStreams(url, api_key)
    if not workload.models:
        workload = replace(workload, models=(await _first_model(streams),))
    report: dict[str, Any] = {
        "bench": "serve",
        "url": url,
        "workload": asdict(workload),
        "promise": asdict(promise),
        "cases": [],
    }
    try:
        short = replace(workload, num_requests=WARM_UPS, output_tokens=(2, 2), seed=-1)
        await _Run(streams, short, Arrivals(streams=1)).measured(0)
        seeds = itertools.count(workload.seed)

        async def measure(kind: Arrivals, num_requests: int) -> None:
            # Other words each time, so that no cache knows them.
            runs = [
                await _Run(
                    streams, replace(workload, num_requests=num_requests, seed=seed), kind
                ).measured(seed)
                for seed in itertools.islice(seeds, repeats)
            ]
            case = {"arrivals": kind.label, **asdict(kind), **_figures(runs, promise)}
            report["cases"].append(case)
            _show(case)

        for kind in arrivals:
            await measure(kind, workload.num_requests)
        most = max(case["requests_per_s"]["median"] for case in report["cases"])
        for load in loads:
            # Fewer requests where they come more slowly, so that all take about as long.
            count = max(1, round(min(load, 1.0) * workload.num_requests))
            await measure(Arrivals(rate=round(load * most, 3), load=load), count)
    finally:
        streams.close()
    return report


async def _first_model(streams: HttpStreams) -> str:
    try:
        models = await streams.get("/v1/models")
        return str(models["data"][0]["id"])
    except UnreachableError:
        raise
    except (HttpStreamError, LookupError, TypeError) as error:
        raise RequestError(
            f"/v1/models names no model ({error}); name one with --ask-for.", field="url"
        ) from error


@dataclass(frozen=True, slots=True)
class _Measured:
    """One run's requests, and how long all of it took."""

    served: list[Served]
    faults: Counter[str]
    seconds: float


class _Run:
    """One workload under one kind of arrival."""

    def __init__(self, streams: HttpStreams, workload: ServeWorkload, arrivals: Arrivals) -> None:
        self._streams, self._workload, self._arrivals = streams, workload, arrivals
        self._served: list[Served] = []
        self._faults: Counter[str] = Counter()

    async def measured(self, seed: int) -> _Measured:
        conversations = self._workload.conversations()
        due = self._arrivals.due_s(len(conversations), seed)
        limit = asyncio.Semaphore(self._arrivals.streams or len(conversations))
        began = time.perf_counter()

        async def one(conversation: Conversation, due_s: float) -> None:
            await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
            async with limit:
                is_open = self._arrivals.rate is not None
                await self._conversation(
                    conversation, began + due_s if is_open else time.perf_counter()
                )

        await asyncio.gather(*map(one, conversations, due))
        seconds = time.perf_counter() - began
        if not self._served:
            raise RequestError(_no_answer(next(iter(self._faults), "none")), field="url")
        return _Measured(self._served, self._faults, seconds)

    async def _conversation(self, conversation: Conversation, due: float) -> None:
        history: list[dict[str, Any]] = list(conversation.opening())
        path = PATHS[self._workload.is_chat]
        for turn in conversation.turns:
            body = self._workload.body(conversation, history, turn)
            try:
                answer = await self._streams.post(path, body)
                served, text = _read(answer, due)
            except HttpStreamError as error:
                self._faults[str(error)] += 1
                return
            self._served.append(served)
            history += [
                {"role": "user", "content": turn.said}, {"role": "assistant", "content": text}
            ]  # fmt: skip
            due = time.perf_counter()


def _no_answer(fault: str) -> str:
    hint = ""
    if "answered 4" in fault:
        hint = (
            " (--stop-at-end leaves out ignore_eos, which not every server knows; --endpoint and "
            "--ask-for say what is asked)"
        )
    return f"no request was answered; the first fault: {fault}{hint}"


def _read(answer: StreamedAnswer, due: float) -> tuple[Served, str]:
    """An answer's times, and its text."""
    at: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    for time_s, event in answer.events:
        if "error" in event:
            raise HttpStreamError(f"the stream brought an error: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or next(filter(None, map(delta.get, SAID)), None)
            if text:
                at.append(time_s)
                pieces.append(text)
    if not at:
        raise HttpStreamError("an answer had no text in it.")
    return (
        Served(
            first_s=at[0] - due,
            gaps_s=[later - earlier for earlier, later in itertools.pairwise(at)],
            whole_s=answer.end_s - due,
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_output_tokens=usage.get("completion_tokens", len(at)),
        ),
        "".join(pieces),
    )


def _figures(runs: list[_Measured], promise: Promise) -> dict[str, Any]:
    """Each percentile of each run, and then the median of the runs with its spread."""

    def of(values: str) -> dict[str, Any]:
        return {
            f"p{round(100 * share)}": spread(
                [percentile(_values(run.served, values), share) for run in runs], 5
            )
            for share in (0.5, 0.9, 0.99)
        }

    faults = sum((run.faults for run in runs), Counter())
    return {
        "requests": sum(len(run.served) for run in runs) + faults.total(),
        "faults": dict(faults),
        "seconds": spread([run.seconds for run in runs]),
        "prompt_tokens": [sum(s.num_prompt_tokens for s in run.served) for run in runs],
        "requests_per_s": spread([len(run.served) / run.seconds for run in runs], 3),
        "output_tokens_per_s": spread(
            [sum(s.num_output_tokens for s in run.served) / run.seconds for run in runs], 1
        ),
        "goodput_requests_per_s": spread(
            [sum(s.keeps(promise) for s in run.served) / run.seconds for run in runs], 3
        ),
        "time_to_first_token_s": of("first_s"),
        "time_between_tokens_s": of("gaps_s"),
        "whole_s": of("whole_s"),
    }


def _values(served: list[Served], name: str) -> list[float]:
    if name == "gaps_s":
        return [gap for one in served for gap in one.gaps_s] or [0.0]
    return [getattr(one, name) for one in served]


def _show(case: dict[str, Any]) -> None:
    first, between = case["time_to_first_token_s"], case["time_between_tokens_s"]
    num_faults = sum(case["faults"].values())
    failed = f"  {num_faults} FAILED" if num_faults else ""
    print(
        f"{case['arrivals']:>26}  {case['output_tokens_per_s']['median']:9.1f} tok/s  "
        f"first token {_ms(first)} ms  between tokens {_ms(between)} ms (p50, p99)  "
        f"kept its promise {case['goodput_requests_per_s']['median']:.2f} of "
        f"{case['requests_per_s']['median']:.2f} requests/s{failed}",
        file=sys.stderr,
        flush=True,
    )


def _ms(figures: dict[str, Any]) -> str:
    return f"{1e3 * figures['p50']['median']:.1f}, {1e3 * figures['p99']['median']:.1f}"
