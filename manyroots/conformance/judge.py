"""Whether an answer shows that another party has sent the same prompt.

Three measures, each calibrated on the server under test before it judges:

- outputs: an answer's logprobs against a cold answer of the same party. The limit is a multiple of
  what the server's own rounding does, and a pair whose answers are alike is not judged.
- cached_tokens: against what prompts find that were never sent.
- usage: everything else that the server says of a prompt, against the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from manyroots.conformance.client import MAX_TOKENS, CheckedAnswer, ConformanceClient, Party
from manyroots.conformance.features import Features
from manyroots.conformance.prompts import FreshPrompts
from manyroots.conformance.report import Finding, Verdict, not_judged

SLACK_TOKENS = 6
"""Prompts may share so many first tokens by chance."""
_FLOOR = 2e-3
"""Logprobs closer than this are the same, whatever rounding was seen."""
_TIMES_NOISE = 5
_NUM_SAMPLES = 2
_SHARE_OF_DRAFTS = 0.25
"""Of an answer's tokens: so many more accepted drafts are no accident."""

Asking = Callable[[Party], Party]


class Judge:
    """Measures of one server."""

    def __init__(
        self, client: ConformanceClient, prompts: FreshPrompts, features: Features
    ) -> None:
        self._client, self._prompts = client, prompts
        self._most_fresh: int | None = None
        """Cached tokens of prompts that were never sent."""
        self._no_cached: str | None = "not calibrated"
        """Why cached tokens can't judge; None: they can."""
        self._cold: Asking | None = None
        self._limit = math.inf
        self._ways = _cold_ways(features, prompts)

    @property
    def calibration(self) -> dict[str, object]:
        """What was measured, for the report."""
        return {
            "cached_tokens": self._no_cached or f"{self._most_fresh} of a fresh prompt",
            "cold_answers": self._cold is not None,
            "logprob_limit": None if math.isinf(self._limit) else self._limit,
        }

    def calibrate(self, parties: Sequence[Party]) -> None:
        """Learn what a fresh prompt, a repeated one and rounding look like here."""
        self._calibrate_cached(parties)
        self._cold = next(filter(self._is_cold_for(parties[0]), self._ways), None)
        if self._cold is None:
            return
        noise = 0.0
        for party in parties:
            for _ in range(_NUM_SAMPLES):
                prompt = self._prompts.draw()
                first = self._client.ask(party, prompt)
                for other in (self._client.ask(party, prompt), self.cold(party, prompt)):
                    noise = max(noise, distance(first, other))
        self._limit = max(_FLOOR, _TIMES_NOISE * noise)

    def cold(self, party: Party, prompt: str, max_tokens: int = MAX_TOKENS) -> CheckedAnswer:
        """An answer that is computed without cached tokens."""
        assert self._cold is not None
        return self._client.ask(self._cold(party), prompt, max_tokens)

    def stranger(self, party: Party) -> Party | None:
        """The same model and key in a fresh namespace; None where the server has none."""
        return None if self._cold is None else self._cold(party)

    def by_cached(self, party: Party, prompt: str, got: CheckedAnswer, *, most: int = 0) -> Finding:
        """`most`: what the party itself has computed of the prompt before. Nothing is said of a
        prompt that the party does not find again when it is sent once more, as where a page is
        longer than the prompt."""
        if self._no_cached is not None or got.num_cached_tokens is None:
            return not_judged(self._no_cached or "an answer without cached_tokens", "cached_tokens")
        found = got.num_cached_tokens
        assert self._most_fresh is not None
        allowed = max(self._most_fresh, most)
        what = f"{found} of {got.num_prompt_tokens} prompt tokens found"
        if found > allowed + SLACK_TOKENS:
            return Finding("cached_tokens", Verdict.LEAK, f"{what}, {allowed} are its own")
        again = self._client.ask(party, prompt).num_cached_tokens
        if again is None or again <= allowed + SLACK_TOKENS:
            why = "the prompt is not found again by its own party, either"
            return not_judged(why, "cached_tokens")
        return Finding("cached_tokens", Verdict.APART, what)

    def by_outputs(
        self, party: Party, prompt: str, got: CheckedAnswer, other: CheckedAnswer
    ) -> Finding:
        """An answer against a cold one of `party`. Where the other party's answer is like it, too,
        a leak would not be seen."""
        if self._cold is None:
            return not_judged("no way to ask for a cold answer", "outputs")
        cold = self.cold(party, prompt, max(MAX_TOKENS, len(got.tokens)))
        if self.has_found(cold):
            return not_judged("an answer that should be cold found tokens", "outputs")
        apart = distance(got, cold)
        if apart > self._limit:
            return Finding(
                "outputs", Verdict.LEAK,
                f"logprobs are {apart:.3g} from a cold answer's (limit {self._limit:.3g})",
            )  # fmt: skip
        if distance(other, cold) <= self._limit:
            return not_judged("the two answer alike", "outputs")
        return Finding("outputs", Verdict.APART, f"logprobs are {apart:.2g} from a cold answer's")

    def by_usage(self, got: CheckedAnswer, fresh: CheckedAnswer) -> Finding:
        """What is told of a prompt of another party, against one that was never sent."""
        if not got.details and not fresh.details:
            return not_judged("the server tells nothing of prompt tokens", "usage")
        names = sorted(set(got.details) | set(fresh.details))
        told = [name for name in names if got.details.get(name) != fresh.details.get(name)]
        # A number that only chance changed is judged as cached tokens are.
        told = [name for name in told if name != "cached_tokens"]
        if told:
            shown = ", ".join(f"{name} is {got.details.get(name)!r}" for name in told)
            return Finding("usage", Verdict.LEAK, f"{shown}, unlike for a fresh prompt")
        return Finding("usage", Verdict.APART, "usage is that of a fresh prompt")

    def by_drafts(
        self, before: CheckedAnswer, sent: CheckedAnswer, got: CheckedAnswer, again: CheckedAnswer
    ) -> Finding:
        """Accepted drafts of one answer, before and after another party got `sent`; `again` is of
        the party that got it last, which shows whether the server drafts at all."""
        own, accepted = before.num_accepted or 0, got.num_accepted or 0
        what = f"{accepted} of {len(got.tokens)} tokens drafted, {own} before"
        least = _SHARE_OF_DRAFTS * len(got.tokens)
        if accepted - own > least:
            return Finding("drafts", Verdict.LEAK, what)
        if (again.num_accepted or 0) - own <= least:
            return not_judged("no drafts are reported for an answer that is given again", "drafts")
        if sent.tokens != got.tokens:
            return not_judged("the two answer differently", "drafts")
        return Finding("drafts", Verdict.APART, what)

    def has_found(self, got: CheckedAnswer) -> bool | None:
        """Whether a prompt's own party found it again; None where the server does not say."""
        if self._no_cached is not None or got.num_cached_tokens is None:
            return None
        assert self._most_fresh is not None
        return got.num_cached_tokens > self._most_fresh + SLACK_TOKENS

    def _calibrate_cached(self, parties: Sequence[Party]) -> None:
        fresh: list[int | None] = []
        again: list[int | None] = []
        for party in parties:
            for _ in range(_NUM_SAMPLES):
                prompt = self._prompts.draw()
                fresh.append(self._client.ask(party, prompt).num_cached_tokens)
                again.append(self._client.ask(party, prompt).num_cached_tokens)
        known = [count for count in fresh if count is not None]
        found = [count for count in again if count is not None]
        if len(known) < len(fresh) or len(found) < len(again):
            self._no_cached = "the server tells no cached_tokens"
            return
        self._most_fresh = max(known)
        if max(found) <= self._most_fresh + SLACK_TOKENS:
            self._no_cached = "a repeated prompt finds nothing: is the prefix cache off?"
            return
        self._no_cached = None

    def _is_cold_for(self, party: Party) -> Callable[[Asking], bool]:
        def is_cold(way: Asking) -> bool:
            prompt = self._prompts.draw()
            self._client.ask(party, prompt)
            return self.has_found(self._client.ask(way(party), prompt)) is not True

        return is_cold


def distance(one: CheckedAnswer, other: CheckedAnswer) -> float:
    """The largest difference of a token's logprob, up to where the two go on with other tokens."""
    if not one.top or not other.top:
        return 0.0 if one.tokens == other.tokens else math.inf
    most = 0.0
    for place, (mine, its) in enumerate(zip(one.top, other.top, strict=False)):
        shared = mine.keys() & its.keys()
        if not shared:
            return math.inf
        most = max(most, *(abs(mine[token] - its[token]) for token in shared))
        if one.tokens[place : place + 1] != other.tokens[place : place + 1]:
            break
    return most


def worst(findings: Iterable[Finding]) -> list[Finding]:
    """Of each measure the finding that decides: a leak first, then what was judged."""
    order = (Verdict.NOT_JUDGED, Verdict.APART, Verdict.LEAK)
    chosen: dict[str, Finding] = {}
    for finding in findings:
        known = chosen.get(finding.by)
        if known is None or order.index(finding.verdict) > order.index(known.verdict):
            chosen[finding.by] = finding
    return list(chosen.values())


def _cold_ways(features: Features, prompts: FreshPrompts) -> list[Asking]:
    """How a request can be kept from the cache: whatever this server has of them."""

    def with_a_salt_of_its_own(party: Party) -> Party:
        return party.salted(prompts.word())

    def without_cache(party: Party) -> Party:
        fields = {**party.fields, "cache_prompt": False}
        return Party(party.label, party.model, party.key, fields)

    ways: list[Asking] = []
    if features.no_salts is None:
        ways.append(with_a_salt_of_its_own)
    if features.can_skip_cache:
        ways.append(without_cache)
    return ways
