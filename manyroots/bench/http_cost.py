"""`manyroots bench http`: what the server adds to a token: the same requests over HTTP and without.

Starts a server of its own on loopback and an engine in this process, with equal settings, and sends
both the same prompts (tokens, greedy, all at once), alternately. So a shared machine slows
both. Each turn gives a ratio of times per token; the median of those is the figure. The load
generator runs on the same machine, and what it takes counts as the server's.

Processor time does not depend on other processes. By token there are three: E of the engine in
this process, E' of the engine's process of the server, which also packs and sends, and H of the
process that talks HTTP. Where H has a core of its own, engine and server work at the same time, and
the slower of them is the pace: what is added is max(E', H) / E - 1. On one core it is
(E' + H) / E - 1. `is_pinned` gives the engines a core of their own and the rest the others, so that
the clock on the wall shows the first on a quiet machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyroots.bench.cores import Cores, put_on
from manyroots.bench.drive import Timeline, drive
from manyroots.bench.http_stream import HttpStreamError, HttpStreams
from manyroots.bench.machine import describe_machine
from manyroots.bench.spread import percentile, spread
from manyroots.config import engine_settings
from manyroots.engine.build import Engine, build_engine
from manyroots.errors import ConfigError
from manyroots.ids import RequestId
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams

START_S = 600
NAME = "bench"


@dataclass(frozen=True, slots=True)
class HttpWorkload:
    """What is sent, at each number of streams."""

    streams: tuple[int, ...]
    prompt_len: int
    output_len: int
    repeats: int
    is_pinned: bool = False
    """Whether engines have a core of their own."""

    def prompts(self, count: int, vocab_size: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        # Not the first few, which are often special.
        return [
            [rng.randrange(min(100, vocab_size - 1), vocab_size) for _ in range(self.prompt_len)]
            for _ in range(count)
        ]


def run_http(workload: HttpWorkload, engine: dict[str, Any]) -> dict[str, Any]:
    """Measure every number of streams; prints a table as it goes and gives the report."""
    report: dict[str, Any] = {
        "bench": "http",
        "engine": engine,
        "workload": asdict(workload),
        "machine": describe_machine(),
        "cases": [],
    }
    cores = Cores.divided() if workload.is_pinned else None
    with started_server(engine) as server, contextlib.closing(_Engine(engine)) as own:
        if cores is not None:
            if server.http_pid is not None:
                put_on(server.http_pid, cores.rest)
            if server.engine_pid is not None:
                put_on(server.engine_pid, cores.engine)
        for count in workload.streams:
            case = _Case(workload, count, server, own, cores).measure()
            report["cases"].append(case)
            _show(case)
    return report


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server: a supervisor, its child that answers HTTP, and that one's child, the engine."""

    url: str
    pid: int
    """Of the supervisor."""

    @property
    def http_pid(self) -> int | None:
        """The process that answers HTTP; None where the system does not say."""
        return next(iter(_children_of(self.pid)), None)

    @property
    def engine_pid(self) -> int | None:
        """The engine's process; None where the system does not say."""
        engines = (pid for pid in _children_of(self.http_pid) if "engine.process" in _command(pid))
        return next(engines, None)

    def processor_s(self) -> tuple[float | None, float | None]:
        """Of the process that answers HTTP and of the engine's, so far."""
        return processor_s_of(self.http_pid), processor_s_of(self.engine_pid)


def _children_of(pid: int | None) -> list[int]:
    """Of all its threads; none where the system does not say."""
    try:
        listed = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for children in listed for child in children.split()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def processor_s_of(pid: int | None) -> float | None:
    """None where the system does not say."""
    try:
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(numbers[11]) + int(numbers[12])) / float(os.sysconf("SC_CLK_TCK"))


@contextlib.contextmanager
def started_server(engine: dict[str, Any]) -> Iterator[ServerProcess]:
    """A server with these settings that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as home:
        config, log = Path(home) / "server.json", Path(home) / "server.log"
        # JSON is YAML, which is what --config reads.
        config.write_text(json.dumps({**engine, "served_model_name": NAME}, default=list))
        command = [sys.executable, "-m", "manyroots", "serve", "--config", str(config)]
        with log.open("wb") as written:
            process = subprocess.Popen(
                [*command, "--port", str(port)], stdout=written, stderr=subprocess.STDOUT
            )
        server = ServerProcess(f"http://127.0.0.1:{port}", process.pid)
        try:
            _wait_until_ready(server, process, log)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(server: ServerProcess, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return
        time.sleep(0.2)
    tail = log.read_text(errors="replace")[-2000:]
    raise ConfigError(f"the server did not start with these settings; it said:\n{tail}")


@dataclass(frozen=True, slots=True)
class _Driven:
    """One turn without HTTP."""

    line: Timeline
    processor_s: float

    @property
    def per_token_s(self) -> float:
        return self.line.seconds / self.line.num_tokens


class _Engine:
    """The same settings in this process, without HTTP."""

    def __init__(self, engine: dict[str, Any]) -> None:
        self._engine: Engine = build_engine(engine_settings(engine))
        self._next_id = 0
        self.vocab_size = self._engine.info.vocab_size

    def run(self, prompts: list[list[int]], output_len: int, salt: str) -> _Driven:
        sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        submits = []
        for prompt in prompts:
            self._next_id += 1
            submits.append(
                Submit(
                    RequestId(self._next_id), prompt, salt, sampling, 0, (), adapter=None,
                )
            )  # fmt: skip
        before = time.process_time()
        line = drive(self._engine, submits)
        return _Driven(line, time.process_time() - before)

    def close(self) -> None:
        self._engine.loop.close()


@dataclass(frozen=True, slots=True)
class _Served:
    seconds: float
    gaps_s: list[float]
    first_s: list[float]
    num_tokens: int
    most_open: int
    """Streams that had begun and not ended, at any one time."""
    processor_s: float | None
    """Of the process that talks HTTP."""
    engine_processor_s: float | None


class _Case:
    """So many streams at once."""

    def __init__(
        self,
        workload: HttpWorkload,
        count: int,
        server: ServerProcess,
        engine: _Engine,
        cores: Cores | None,
    ) -> None:
        self._workload, self._count = workload, count
        self._server, self._engine, self._cores = server, engine, cores

    def measure(self) -> dict[str, Any]:
        self._turn(-1, output_len=2)
        turns = [self._turn(turn, self._workload.output_len) for turn in range(self._repeats)]
        driven, served = [turn[0] for turn in turns], [turn[1] for turn in turns]
        engines = [own.line for own in driven]
        return {
            "streams": self._count,
            "step_ms": spread([1e3 * line.seconds / len(line.marks) for line in engines], 2),
            "engine_tokens_per_s": spread([line.num_tokens / line.seconds for line in engines], 1),
            "http_tokens_per_s": spread([s.num_tokens / s.seconds for s in served], 1),
            "added_per_token": spread(
                [s.seconds / s.num_tokens / own.per_token_s - 1 for own, s in turns], 4
            ),
            "engine_processor_us_per_token": spread(
                [1e6 * own.processor_s / own.line.num_tokens for own in driven], 1
            ),
            **_by_processor_time(turns),
            "most_open_streams": min(s.most_open for s in served),
            "time_to_first_token_s": _percentiles([s.first_s for s in served]),
            "time_between_tokens_s": _percentiles([s.gaps_s for s in served]),
        }

    @property
    def _repeats(self) -> int:
        return self._workload.repeats

    def _turn(self, turn: int, output_len: int) -> tuple[_Driven, _Served]:
        """Once without HTTP and once with it, which of them first by turns."""
        prompts = self._workload.prompts(self._count, self._engine.vocab_size, turn)
        salt = f"{self._count} streams, turn {turn}"
        if turn % 2:
            served = self._over_http(prompts, output_len, salt)
            return self._without(prompts, output_len, salt), served
        line = self._without(prompts, output_len, salt)
        return line, self._over_http(prompts, output_len, salt)

    def _without(self, prompts: list[list[int]], output_len: int, salt: str) -> _Driven:
        if self._cores is not None:
            put_on(os.getpid(), self._cores.engine)
        return self._engine.run(prompts, output_len, salt)

    def _over_http(self, prompts: list[list[int]], output_len: int, salt: str) -> _Served:
        if self._cores is not None:
            put_on(os.getpid(), self._cores.rest)
        return asyncio.run(self._serve(prompts, output_len, salt))

    async def _serve(self, prompts: list[list[int]], output_len: int, salt: str) -> _Served:
        streams = HttpStreams(self._server.url, None)
        body = {
            "model": NAME, "max_tokens": output_len, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
        }  # fmt: skip
        before = self._server.processor_s()
        began = time.perf_counter()
        try:
            answers = await asyncio.gather(
                *(streams.post("/v1/completions", {**body, "prompt": prompt}) for prompt in prompts)
            )
        finally:
            streams.close()
        seconds = time.perf_counter() - began
        after = self._server.processor_s()
        times = [[at for at, event in answer.events if event.get("choices")] for answer in answers]
        tokens = [answer.events[-1][1]["usage"]["completion_tokens"] for answer in answers]
        if set(tokens) != {output_len} or not all(times):
            raise HttpStreamError(f"asked for {output_len} tokens each, and got {sorted(tokens)}.")
        return _Served(
            seconds=seconds,
            gaps_s=[b - a for at in times for a, b in itertools.pairwise(at)] or [0.0],
            first_s=[at[0] - began for at in times],
            num_tokens=sum(tokens),
            most_open=_most_open(
                [(at[0], answer.end_s) for at, answer in zip(times, answers, strict=True)]
            ),
            processor_s=_passed(before[0], after[0]),
            engine_processor_s=_passed(before[1], after[1]),
        )


def _passed(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _by_processor_time(turns: list[tuple[_Driven, _Served]]) -> dict[str, Any]:
    """What each process takes for a token, and what that adds; see the top of this file."""
    found: dict[str, list[float]] = {}
    for own, served in turns:
        http, engine = served.processor_s, served.engine_processor_s
        if http is None or engine is None:
            continue
        base = own.processor_s / own.line.num_tokens
        http, engine = http / served.num_tokens, engine / served.num_tokens
        figures = {
            "http_processor_us_per_token": 1e6 * http,
            "served_engine_processor_us_per_token": 1e6 * engine,
            "added_with_a_core_of_its_own": max(engine, http) / base - 1,
            "added_on_one_core": (engine + http) / base - 1,
        }
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return {name: spread(values, 4) for name, values in found.items()}


def _most_open(spans: list[tuple[float, float]]) -> int:
    """Most of the spans that any one time lies in."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _percentiles(runs: list[list[float]]) -> dict[str, Any]:
    return {
        f"p{round(100 * share)}": spread([percentile(values, share) for values in runs], 5)
        for share in (0.5, 0.99)
    }


def _show(case: dict[str, Any]) -> None:
    added = case["added_per_token"]
    print(
        f"{case['streams']:>6} streams  step {case['step_ms']['median']:.1f} ms  "
        f"engine {case['engine_tokens_per_s']['median']:.1f} tok/s  "
        f"HTTP {case['http_tokens_per_s']['median']:.1f} tok/s  "
        f"adds {added['median']:.1%} ({added['least']:.1%} to {added['most']:.1%}) a token  "
        f"at most {case['most_open_streams']} streams open at once",
        file=sys.stderr,
        flush=True,
    )
    if "http_processor_us_per_token" not in case:
        return
    engine, served, http = (
        case[f"{name}processor_us_per_token"]["median"]
        for name in ("engine_", "served_engine_", "http_")
    )
    apart, together = case["added_with_a_core_of_its_own"], case["added_on_one_core"]
    print(
        f"        processor time a token: engine {engine:.0f} us, in the server {served:.0f} us, "
        f"HTTP {http:.0f} us; by that HTTP adds {apart['median']:.1%} ({apart['least']:.1%} to "
        f"{apart['most']:.1%}) where it has a core of its own, {together['median']:.1%} on one",
        file=sys.stderr,
        flush=True,
    )
