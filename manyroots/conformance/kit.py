"""All checks in order: what `manyroots conformance` runs.

In: settings. Out: rows as they come, and the report. Which pairs there are follows from what the
server serves and what the user gave.
"""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyroots.conformance.client import ConformanceClient, Party
from manyroots.conformance.events import publishing
from manyroots.conformance.features import Features, look_at
from manyroots.conformance.judge import Judge
from manyroots.conformance.outliving import flood, outliving
from manyroots.conformance.pairs import Bench, crossing, drafting, grafting, timing, together
from manyroots.conformance.prompts import FreshPrompts
from manyroots.conformance.reloads import LoadedAdapters, look_alikes, naming, reloading
from manyroots.conformance.report import CheckRow, exit_code, not_judged, rows_as_json
from manyroots.conformance.times import MIN_ROUNDS
from manyroots.errors import ConfigError
from manyroots.version import __version__

CHECKS = (
    "adapters", "salts", "keys", "deep", "together", "drafts", "times", "reloads", "names",
    "events", "tiers", "restart",
)  # fmt: skip
_SHARE_OF_CONTEXT = 0.7
_PROBE_WORDS = 40
_UNKNOWN_CONTEXT = 2048
_RESTART_LIMIT_S = 600.0

Pair = tuple[Party, Party]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceSettings:
    """What a user may say."""

    url: str
    api_keys: tuple[str, ...] = ()
    """The first is used throughout; a second one is another tenant."""
    admin_key: str | None = None
    """For loading adapters; the first API key if left out."""
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Names, each with further fields of the body; empty for those that the server lists."""
    folders: tuple[str, ...] = ()
    """Two adapters that the server can load."""
    scratch: str | None = None
    """A folder that kit and server can open."""
    salts: bool | None = None
    """Whether the server knows `cache_salt`; None: as its OpenAPI document says."""
    prompt_tokens: int = 256
    timed_tokens: int = 2048
    """Of prompts that are timed, or less where the context has no room."""
    rounds: int = MIN_ROUNDS
    flood_tokens: int = 0
    """More than the device holds; 0 leaves tiers out."""
    settle_s: float = 1.0
    """How long what was computed may take to reach the lower tiers."""
    restart: Callable[[], None] | None = None
    kv_events: str | None = None
    seed: int | None = None
    """None: another one each time, since caches outlive runs."""
    only: frozenset[str] = frozenset(CHECKS)

    def check(self) -> None:
        if self.rounds < MIN_ROUNDS:
            raise ConfigError(
                f"--rounds is {self.rounds}; fewer than {MIN_ROUNDS} can't tell chance from a leak."
            )
        if self.prompt_tokens < 64:
            raise ConfigError(f"--prompt-tokens is {self.prompt_tokens}; give at least 64.")
        if unknown := self.only - set(CHECKS):
            raise ConfigError(
                f"--only has {', '.join(sorted(unknown))}; choose of {', '.join(CHECKS)}."
            )


def run_kit(
    settings: ConformanceSettings, show: Callable[[CheckRow], None] = lambda _: None
) -> dict[str, Any]:
    """Run every check that was asked for; gives the report."""
    settings.check()
    seed = secrets.randbits(64) if settings.seed is None else settings.seed
    first_key = next(iter(settings.api_keys), None)
    client = ConformanceClient(settings.url, settings.admin_key or first_key)
    try:
        kit = _Kit(settings, client, first_key, seed)
        rows = []
        for found in kit.rows():
            rows.append(found)
            show(found)
    finally:
        client.close()
    return {
        "kit": f"manyroots {__version__}",
        "url": client.url,
        "server_version": kit.features.version,
        "seed": seed,
        "calibration": kit.bench.judge.calibration,
        "rows": rows_as_json(rows),
        "exit_code": exit_code(rows),
    }


class _Kit:
    """One run."""

    def __init__(
        self, settings: ConformanceSettings, client: ConformanceClient, key: str | None, seed: int
    ) -> None:
        self._settings, self._client = settings, client
        self.features: Features = look_at(
            client, key, adapters=settings.adapters, folders=settings.folders, salts=settings.salts
        )
        prompts = FreshPrompts(seed, _PROBE_WORDS)
        words_for = self._words_for(prompts)
        prompts.num_words = words_for(settings.prompt_tokens)
        judge = Judge(client, prompts, self.features)
        self.bench = Bench(
            client, prompts, judge, settings.rounds, words_for(settings.timed_tokens),
            random.Random(seed),
        )  # fmt: skip
        self._base = self.features.base
        self._loads: LoadedAdapters | None = None
        if self.features.no_loads is None:
            self._loads = LoadedAdapters(self.bench, self._base, settings.folders)
        self._adapters: tuple[Party, ...] = ()

    def _words_for(self, prompts: FreshPrompts) -> Callable[[int], int]:
        """How many words make a prompt of so many tokens, if the context has room for it."""
        told = self._client.ask(self.features.base, prompts.draw()).num_prompt_tokens
        per_word = (told or 2 * _PROBE_WORDS) / _PROBE_WORDS
        room = self.features.max_model_len or _UNKNOWN_CONTEXT
        most = int(room * _SHARE_OF_CONTEXT)
        return lambda tokens: max(8, int(min(tokens, most) / per_word))

    def rows(self) -> Iterator[CheckRow]:
        checks: dict[str, Callable[[], Iterator[CheckRow]]] = {
            "adapters": self._between_adapters,
            "salts": self._between_salts,
            "keys": self._between_keys,
            "deep": lambda: self._each_pair("deep in a prompt", grafting),
            "together": lambda: self._each_pair("at the same time", together),
            "drafts": lambda: self._each_pair("drafts", drafting),
            "times": lambda: self._each_pair("times", timing),
            "reloads": self._reloads,
            "names": self._names,
            "events": self._events,
            "tiers": self._tiers,
            "restart": self._restart,
        }
        try:
            self._adapters = self._two_adapters()
            self.bench.judge.calibrate([self._base, *self._adapters])
            for name in CHECKS:
                if name in self._settings.only:
                    yield from checks[name]()
        finally:
            if self._loads is not None:
                self._loads.close()

    def _two_adapters(self) -> tuple[Party, ...]:
        """Those that are served, or that the kit can load."""
        served = self.features.adapters
        if len(served) >= 2 or self._loads is None:
            return served[:2]
        word = self.bench.prompts.word()
        folders = (self._loads.first, self._loads.second)
        return tuple(
            self._loads.load(f"{word}-{number}", folder) for number, folder in enumerate(folders)
        )

    # Pairs

    def _adapter_pairs(self) -> list[Pair]:
        parties = (self._base, *self._adapters)
        return list(itertools.permutations(parties, 2))

    def _salt_pair(self) -> Pair:
        word = self.bench.prompts.word()
        party = self._adapters[0] if self._adapters else self._base
        return (
            party.salted(f"{word}-one", "salt one"), party.salted(f"{word}-two", "salt two")
        )  # fmt: skip

    def _key_pair(self) -> Pair:
        one, other = self._settings.api_keys[:2]
        party = self._adapters[0] if self._adapters else self._base
        return (
            Party("key one", party.model, one, party.fields),
            Party("key two", party.model, other, party.fields),
        )

    def _few_pairs(self) -> list[Pair]:
        """One of each kind, for checks that take long."""
        pairs: list[Pair] = []
        if len(self._adapters) >= 2:
            pairs.append((self._adapters[0], self._adapters[1]))
        if self._adapters:
            pairs.append((self._adapters[0], self._base))
        if self.features.no_salts is None:
            pairs.append(self._salt_pair())
        if len(self._settings.api_keys) >= 2:
            pairs.append(self._key_pair())
        return pairs

    # Checks

    def _between_adapters(self) -> Iterator[CheckRow]:
        if not self._adapters:
            why = "no adapter is served, and --folders has none to load"
            yield CheckRow("adapters", "all", (not_judged(why),))
        for writer, reader in self._adapter_pairs():
            yield crossing(self.bench, "adapters", writer, reader, are_tenants=False)

    def _between_salts(self) -> Iterator[CheckRow]:
        if self.features.no_salts is not None:
            yield CheckRow("salts", "all", (not_judged(self.features.no_salts),))
            return
        one, other = self._salt_pair()
        party = self._adapters[0] if self._adapters else self._base
        for pair in ((one, other), (party, one), (one, party)):
            yield crossing(self.bench, "salts", *pair, are_tenants=True)
        for kind, (mine, its) in look_alikes(self.bench.prompts.word()).items():
            pair = (party.salted(mine), party.salted(its))
            yield crossing(self.bench, "salts", *pair, are_tenants=True, pair=kind)

    def _between_keys(self) -> Iterator[CheckRow]:
        if len(self._settings.api_keys) < 2:
            why = "give two keys of two tenants with --api-key"
            yield CheckRow("keys", "all", (not_judged(why),))
            return
        one, other = self._key_pair()
        for pair in ((one, other), (other, one)):
            yield crossing(self.bench, "keys", *pair, are_tenants=True)

    def _each_pair(
        self, check: str, run: Callable[[Bench, Party, Party], CheckRow]
    ) -> Iterator[CheckRow]:
        pairs = self._few_pairs()
        if not pairs:
            yield CheckRow(check, "all", (not_judged("there are no two parties"),))
        for pair in pairs:
            yield run(self.bench, *pair)

    def _reloads(self) -> Iterator[CheckRow]:
        check = "other content under one name"
        if self._loads is None:
            yield CheckRow(check, "all", (not_judged(self.features.no_loads or ""),))
            return
        yield from reloading(self.bench, self._loads, self._settings.scratch)

    def _names(self) -> Iterator[CheckRow]:
        if self._loads is None:
            yield CheckRow("names", "all", (not_judged(self.features.no_loads or ""),))
            return
        yield from naming(self.bench, self._loads)

    def _events(self) -> Iterator[CheckRow]:
        endpoint, pairs = self._settings.kv_events, self._few_pairs()
        if endpoint is None or not pairs:
            why = "give the address of its KV events with --kv-events"
            yield CheckRow("KV events", "all", (not_judged(why),))
            return
        yield from publishing(self.bench, endpoint, pairs)

    def _tiers(self) -> Iterator[CheckRow]:
        num_tokens, pairs = self._settings.flood_tokens, self._few_pairs()
        if not num_tokens or not pairs:
            why = "give more tokens than the device holds with --flood-tokens"
            yield CheckRow("lower tiers", "all", (not_judged(why),))
            return
        yield from outliving(
            self.bench, "lower tiers", pairs,
            lambda: flood(self.bench, self._base, num_tokens), self._settings.settle_s,
        )  # fmt: skip

    def _restart(self) -> Iterator[CheckRow]:
        restart, pairs = self._settings.restart, self._few_pairs()
        if restart is None or not pairs:
            why = "give a command that restarts the server with --restart"
            yield CheckRow("after a restart", "all", (not_judged(why),))
            return
        served = {party.model for party in self.features.adapters}
        if any(party.model not in served for party in self._adapters):
            why = "a restart unloads adapters of the kit: serve two from its start"
            yield CheckRow("after a restart", "all", (not_judged(why),))
            return

        def restarted() -> None:
            restart()
            self._client.wait_until_up(self._base.key, _RESTART_LIMIT_S)

        yield from outliving(
            self.bench, "after a restart", pairs, restarted, self._settings.settle_s
        )
