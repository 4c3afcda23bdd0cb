"""Checks of two parties that send the same prompts: one after the other, deep inside a prompt,
together, and by the clock.

In: a writer, whose prompts are sent first, and a reader, which must not notice. Out: one row each.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from manyroots.conformance.client import CheckedAnswer, ConformanceClient, Party, RefusedError
from manyroots.conformance.judge import Judge, worst
from manyroots.conformance.prompts import FreshPrompts
from manyroots.conformance.report import CheckRow, Finding, not_judged
from manyroots.conformance.times import judge_times

_NUM_PROMPTS = 2
_BURST = 3
"""Requests of each party that are sent together."""
_BURST_TOKENS = 32
"""Long enough that requests which a busy client sends one by one still share steps."""

_DRAFTED_TOKENS = 48
_MOST_DRAWS = 8
"""Of sampled answers, until one does not end early: a short one leaves no room for drafts."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What every check needs."""

    client: ConformanceClient
    prompts: FreshPrompts
    judge: Judge
    num_rounds: int
    """Of timed requests, at each of the looks."""
    num_timed_words: int
    """Of prompts that are timed: the longer, the more a hit saves."""
    rng: random.Random


def row(check: str, pair: str, run: Callable[[], list[Finding]]) -> CheckRow:
    """A check that the server refuses is not judged, and says what the server said."""
    try:
        return CheckRow(check, pair, tuple(worst(run())))
    except RefusedError as error:
        return CheckRow(check, pair, (not_judged(str(error)),))


def names(writer: Party, reader: Party) -> str:
    return f"{writer.label} -> {reader.label}"


def crossing(
    bench: Bench, check: str, writer: Party, reader: Party, *, are_tenants: bool, pair: str = ""
) -> CheckRow:
    """The reader sends what the writer has just sent. `are_tenants`: whether whatever else is said
    of the prompt is judged, too."""

    def run() -> list[Finding]:
        findings = []
        for _ in range(_NUM_PROMPTS):
            prompt = bench.prompts.draw()
            sent = bench.client.ask(writer, prompt)
            got = bench.client.ask(reader, prompt)
            findings.append(bench.judge.by_cached(reader, prompt, got))
            if are_tenants:
                fresh = bench.client.ask(reader, bench.prompts.draw())
                findings.append(bench.judge.by_usage(got, fresh))
            findings.append(bench.judge.by_outputs(reader, prompt, got, sent))
        return findings

    return row(check, pair or names(writer, reader), run)


def grafting(bench: Bench, writer: Party, reader: Party) -> CheckRow:
    """The reader knows the first half of a prompt, and the writer has sent all of it: a cache that
    tells the two apart by the first page alone gives the reader the writer's second half."""

    def run() -> list[Finding]:
        half = max(2, bench.prompts.num_words // 2)
        head, tail = bench.prompts.draw(half), bench.prompts.draw(half)
        prompt = f"{head} {tail}"
        own = bench.client.ask(reader, head).num_prompt_tokens or 0
        sent = bench.client.ask(writer, prompt)
        got = bench.client.ask(reader, prompt)
        return [
            bench.judge.by_cached(reader, prompt, got, most=own),
            bench.judge.by_outputs(reader, prompt, got, sent),
        ]

    return row("deep in a prompt", names(writer, reader), run)


def together(bench: Bench, writer: Party, reader: Party) -> CheckRow:
    """Both send the same prompt at once, several times: steps that compute it for both."""

    def run() -> list[Finding]:
        prompt = bench.prompts.draw()
        parties = [writer, reader] * _BURST
        with ThreadPoolExecutor(len(parties)) as pool:
            answers: list[CheckedAnswer] = list(
                pool.map(lambda party: bench.client.ask(party, prompt, _BURST_TOKENS), parties)
            )
        sent, got = answers[::2], answers[1::2]
        findings = [bench.judge.by_outputs(reader, prompt, one, sent[0]) for one in got]
        return findings + [bench.judge.by_outputs(writer, prompt, one, got[0]) for one in sent]

    return row("at the same time", names(writer, reader), run)


def drafting(bench: Bench, writer: Party, reader: Party) -> CheckRow:
    """Drafts that come from another party's answer. All answers are sampled with one seed: greedy
    text soon repeats itself, so that drafts from it would be accepted too."""

    def run() -> list[Finding]:
        first, last = bench.judge.stranger(reader), bench.judge.stranger(reader)
        if first is None or last is None:
            return [not_judged("no way to ask in a fresh namespace", "drafts")]
        for _ in range(_MOST_DRAWS):
            prompt, seed = bench.prompts.draw(), bench.rng.randrange(1 << 31)
            before = bench.client.ask(first, prompt, _DRAFTED_TOKENS, seed)
            if len(before.tokens) >= _DRAFTED_TOKENS // 2:
                break
        answers = [
            bench.client.ask(party, prompt, _DRAFTED_TOKENS, seed) for party in (writer, last, last)
        ]
        return [bench.judge.by_drafts(before, *answers)]

    return row("drafts", names(writer, reader), run)


def timing(bench: Bench, writer: Party, reader: Party) -> CheckRow:
    """Times alone. A request costs one token, and follows one of the writer, so that changing
    from party to party costs the same each time."""

    def seconds(party: Party, prompt: str) -> float:
        return bench.client.ask(party, prompt, max_tokens=1).seconds

    def measure(kind: str) -> float:
        count = bench.num_timed_words
        prompt, other = bench.prompts.draw(count), bench.prompts.draw(count)
        if kind == "own":
            seconds(reader, prompt)
        seconds(writer, prompt if kind == "crossed" else other)
        return seconds(reader, prompt)

    def run() -> list[Finding]:
        for _ in range(2):  # the first requests of all are slower
            measure("own")
        return [judge_times(measure, bench.num_rounds, bench.rng)]

    return row("times", names(writer, reader), run)
