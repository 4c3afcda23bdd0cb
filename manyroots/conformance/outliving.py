"""Checks of what outlives the device or the process: lower tiers, and restarts.

In: pairs, and how to push pages out or to restart the server. Out: rows. They judge only where the
writer itself finds its prompts again afterwards: otherwise nothing was there to leak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from manyroots.conformance.client import Party
from manyroots.conformance.pairs import Bench, names, row
from manyroots.conformance.report import CheckRow, Finding, not_judged


def outliving(
    bench: Bench,
    check: str,
    pairs: Sequence[tuple[Party, Party]],
    push_out: Callable[[], None],
    settle_s: float,
) -> list[CheckRow]:
    """The writers send prompts, `push_out` runs once for all pairs, the readers send them."""
    sent = []
    for writer, _ in pairs:
        crossed, kept = bench.prompts.draw(), bench.prompts.draw()
        answers = [bench.client.ask(writer, prompt) for prompt in (crossed, kept)]
        # Asked for again, so that caches which keep what is reused keep it.
        for prompt in (crossed, kept):
            bench.client.ask(writer, prompt)
        sent.append((crossed, kept, answers[0]))
    time.sleep(settle_s)  # what was computed reaches the lower tiers
    push_out()

    def findings(writer: Party, reader: Party, place: int) -> list[Finding]:
        crossed, kept, told = sent[place]
        got = bench.client.ask(reader, crossed)
        found = bench.judge.has_found(bench.client.ask(writer, kept))
        if found is not True:
            why = "the writer finds none of its own prompts afterwards"
            return [not_judged("no cached_tokens" if found is None else why)]
        return [
            bench.judge.by_cached(reader, crossed, got),
            bench.judge.by_outputs(reader, crossed, got, told),
        ]

    return [
        row(check, names(*pair), partial(findings, *pair, place))
        for place, pair in enumerate(pairs)
    ]


def flood(bench: Bench, party: Party, num_tokens: int) -> None:
    """Send fresh prompts until so many tokens were."""
    left = num_tokens
    while left > 0:
        answer = bench.client.ask(party, bench.prompts.draw(bench.num_timed_words), max_tokens=1)
        left -= answer.num_prompt_tokens or bench.num_timed_words
