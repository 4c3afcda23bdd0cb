"""Traces made on the fly: kinds of traffic that reuse prefixes in different ways, or not at all.

Takes a seed and how many lines to make; the same two give the same trace. Arrivals do not wait for
replies: a user's next turn comes when a reply at reading speed would be done, and some time more.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from manyroots.errors import ConfigError
from manyroots.simulate.memory_traces import MEMORY_TRACES
from manyroots.simulate.trace import EndsBy, Trace, TraceRequest, TraceSegment

Maker = Callable[[random.Random, int], list[TraceRequest]]

SECONDS_PER_REPLY_TOKEN = 0.02


def synthetic_trace(name: str, *, seed: int, num_requests: int) -> Trace:
    if name not in SYNTHETIC:
        raise ConfigError(
            f"there is no trace file {name!r}, and no made trace of that name; "
            f"give a JSONL file or one of {', '.join(SYNTHETIC)}."
        )
    lines = SYNTHETIC[name](random.Random(f"{name}/{seed}"), num_requests)
    return tuple(sorted(lines, key=lambda line: line.arrival_s)[:num_requests])


def chat(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """Many tenants, each with a system prompt, a salt and maybe an adapter; talks of 1-8 turns."""
    tenants = [
        (f"tenant-{i}", rng.choice([None, "support", "legal", "sales"]), rng.randint(150, 1200))
        for i in range(12)
    ]
    popularity = [1 / (rank + 1) for rank in range(len(tenants))]
    lines: list[TraceRequest] = []
    start_s, talk = 0.0, 0
    while len(lines) < num_requests:
        start_s += rng.expovariate(4.0)
        talk += 1
        [(tenant, adapter, system_len)] = rng.choices(tenants, popularity)
        said = [TraceSegment(f"{tenant}/system", system_len)]
        arrival_s = start_s
        for turn in range(rng.randint(1, 8)):
            said.append(TraceSegment(f"talk-{talk}/question-{turn}", rng.randint(10, 200)))
            reply = TraceSegment(f"talk-{talk}/answer-{turn}", rng.randint(30, 300))
            lines.append(_turn(arrival_s, said, reply, adapter, tenant))
            arrival_s += reply.length * SECONDS_PER_REPLY_TOKEN + rng.expovariate(1 / 8)
    return lines


def adapters(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """30 adapters of similar popularity, each with a system prompt; conversations of 2-10 turns."""
    systems = {f"adapter-{i}": rng.randint(200, 1000) for i in range(30)}
    names = list(systems)
    lines: list[TraceRequest] = []
    start_s, conversation = 0.0, 0
    while len(lines) < num_requests:
        start_s += rng.expovariate(16.0)
        conversation += 1
        adapter = rng.choice(names)
        said = [TraceSegment(f"{adapter}/system", systems[adapter])]
        arrival_s = start_s
        for turn in range(rng.randint(2, 10)):
            said.append(TraceSegment(f"c-{conversation}/question-{turn}", rng.randint(50, 400)))
            reply = TraceSegment(f"c-{conversation}/answer-{turn}", rng.randint(10, 80))
            lines.append(_turn(arrival_s, said, reply, adapter, None))
            arrival_s += reply.length * SECONDS_PER_REPLY_TOKEN + rng.expovariate(1 / 4)
    return lines


def rounds(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """128 clients that talk at once: one system prompt, up to 12 rounds each, of odd lengths."""
    num_clients = 128
    lines: list[TraceRequest] = []
    for client in range(num_clients):
        said, arrival_s = [TraceSegment("system", 701)], rng.uniform(0.0, 5.0)
        for turn in range(min(12, -(-num_requests // num_clients))):
            said.append(TraceSegment(f"client-{client}/question-{turn}", rng.randint(100, 300)))
            reply = TraceSegment(f"client-{client}/answer-{turn}", rng.randint(40, 150))
            lines.append(_turn(arrival_s, said, reply, None, None))
            arrival_s += reply.length * SECONDS_PER_REPLY_TOKEN + rng.expovariate(1 / 2)
    return lines


def _turn(
    arrival_s: float,
    said: list[TraceSegment],
    reply: TraceSegment,
    adapter: str | None,
    salt: str | None,
) -> TraceRequest:
    """A talk's next turn, which asks with all that was said; the reply is said from then on."""
    request = TraceRequest(
        arrival_s=round(arrival_s, 6),
        prompt=tuple(said),
        adapter=adapter,
        salt=salt,
        output_tokens=reply.length,
        reply=reply.name,
        ends_by=EndsBy.STOP,
    )
    said.append(reply)
    return request


def rollouts(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """Reinforcement learning: batches of prompts, 8 samples of each. Every batch has new weights,
    as each follows a training step, so nothing can be carried over."""
    lines: list[TraceRequest] = []
    for number in range(num_requests):
        batch, problem = divmod(number, 16)
        lines.append(
            TraceRequest(
                arrival_s=30.0 * batch,
                prompt=(
                    TraceSegment("instructions", 256),
                    TraceSegment(f"problem-{batch}-{problem}", rng.randint(80, 600)),
                ),
                adapter=f"policy-{batch}",
                salt=None,
                output_tokens=rng.randint(100, 500),
                n=8,
            )
        )
    return lines


def agents(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """Agents with long descriptions of their tools: short calls, long results, 3-12 steps."""
    kinds = [("coder", None, 9000), ("browser", "browsing", 6000), ("analyst", "sql", 4000)]
    lines: list[TraceRequest] = []
    start_s, task = 0.0, 0
    while len(lines) < num_requests:
        start_s += rng.expovariate(0.5)
        task += 1
        kind, adapter, tools_len = rng.choice(kinds)
        seen = [
            TraceSegment(f"{kind}/tools", tools_len),
            TraceSegment(f"task-{task}", rng.randint(50, 400)),
        ]
        arrival_s = start_s
        for step in range(rng.randint(3, 12)):
            call = TraceSegment(f"task-{task}/call-{step}", rng.randint(20, 150))
            lines.append(
                TraceRequest(
                    arrival_s=round(arrival_s, 6),
                    prompt=tuple(seen),
                    adapter=adapter,
                    salt=None,
                    output_tokens=call.length,
                    reply=call.name,
                    ends_by=EndsBy.STOP,
                )
            )
            seen += [call, TraceSegment(f"task-{task}/result-{step}", rng.randint(50, 1500))]
            arrival_s += call.length * SECONDS_PER_REPLY_TOKEN + rng.expovariate(1 / 2)
    return lines


def scans(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """A few hot prompts, and between their uses long runs of documents that come once: 3 requests
    of 20 are for a hot prompt."""
    lines: list[TraceRequest] = []
    arrival_s = 0.0
    for number in range(num_requests):
        arrival_s += rng.expovariate(2.0)
        prompt: tuple[TraceSegment, ...]
        if number % 20 < 3:
            prompt = (
                TraceSegment(f"hot-{rng.randrange(6)}", 3000),
                TraceSegment(f"question-{number}", 200),
            )
        else:
            prompt = (TraceSegment(f"document-{number}", rng.randint(2000, 9000)),)
        lines.append(_answered(arrival_s, prompt, rng))
    return lines


def documents(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """Documents that get one to five questions over some minutes, and are never seen again: what
    was shared lately is dead sooner than it looks."""
    lines: list[TraceRequest] = []
    start_s, document = 0.0, 0
    while len(lines) < num_requests:
        start_s += rng.expovariate(1 / 3)
        document += 1
        length, arrival_s = rng.randint(1000, 8000), start_s
        for question in range(rng.randint(1, 5)):
            asked = TraceSegment(f"question-{document}-{question}", rng.randint(20, 200))
            prompt = (TraceSegment(f"document-{document}", length), asked)
            lines.append(_answered(arrival_s, prompt, rng))
            arrival_s += rng.expovariate(1 / 50)
    return lines


def reasoning(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """Talks in which the next turn quotes the answer but not the thoughts before it, so that it
    parts from what was generated."""
    lines: list[TraceRequest] = []
    start_s, talk = 0.0, 0
    while len(lines) < num_requests:
        start_s += rng.expovariate(1.0)
        talk += 1
        said, arrival_s = [TraceSegment(f"system-{rng.randrange(8)}", 1500)], start_s
        for turn in range(rng.randint(1, 10)):
            said.append(TraceSegment(f"talk-{talk}/question-{turn}", rng.randint(50, 800)))
            line = _answered(arrival_s, tuple(said), rng, at_most=1500)
            lines.append(line)
            said.append(TraceSegment(f"talk-{talk}/answer-{turn}", rng.randint(50, 500)))
            arrival_s += line.output_tokens * SECONDS_PER_REPLY_TOKEN + rng.expovariate(1 / 10)
    return lines


def _answered(
    arrival_s: float, prompt: tuple[TraceSegment, ...], rng: random.Random, at_most: int = 200
) -> TraceRequest:
    return TraceRequest(
        arrival_s=round(arrival_s, 6),
        prompt=prompt,
        adapter=None,
        salt=None,
        output_tokens=rng.randint(20, at_most),
        ends_by=EndsBy.STOP,
    )


SYNTHETIC: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        chat, adapters, rounds, rollouts, agents, scans, documents, reasoning, *MEMORY_TRACES
    )
}  # fmt: skip
