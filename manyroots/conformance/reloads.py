"""Checks of names that the kit loads itself: other content under one name, and names that differ
in case or Unicode form only.

In: two adapter folders that the server can load. Out: rows. Every name is unloaded again.
"""

from __future__ import annotations

import contextlib
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from manyroots.conformance.client import Party, RefusedError
from manyroots.conformance.pairs import Bench, row
from manyroots.conformance.report import CheckRow, Finding, Verdict, not_judged


class LoadedAdapters:
    """Loads two contents under names of the kit's own."""

    def __init__(self, bench: Bench, base: Party, folders: tuple[str, ...]) -> None:
        self._bench, self._base = bench, base
        self.first, self.second = folders[:2]
        self._loaded: set[str] = set()

    def load(self, name: str, folder: str, *, in_place: bool = False) -> Party:
        self._bench.client.load(name, folder, in_place=in_place)
        self._loaded.add(name)
        return self.party(name)

    def party(self, name: str) -> Party:
        return Party(name, name, self._base.key)

    def unload(self, name: str) -> None:
        self._bench.client.unload(name)
        self._loaded.discard(name)

    def close(self) -> None:
        for name in list(self._loaded):
            with contextlib.suppress(RefusedError):
                self.unload(name)

    @contextlib.contextmanager
    def under(self, name: str, folder: str) -> Iterator[Party]:
        party = self.load(name, folder)
        try:
            yield party
        finally:
            self.unload(name)


def reloading(bench: Bench, adapters: LoadedAdapters, scratch: str | None) -> list[CheckRow]:
    """A name gets other content: in place, after an unload, and from the same path."""

    def in_place(name: str) -> Party:
        return adapters.load(name, adapters.second, in_place=True)

    def after_unload(name: str) -> Party:
        adapters.unload(name)
        return adapters.load(name, adapters.second)

    ways = {"in place": in_place, "after an unload": after_unload}
    rows = [
        row(
            "other content under one name",
            how,
            partial(_reloaded, bench, adapters, adapters.first, way),
        )
        for how, way in ways.items()
    ]
    return [*rows, _from_one_path(bench, adapters, scratch)]


def _reloaded(
    bench: Bench, adapters: LoadedAdapters, first: str, change: Callable[[str], Party]
) -> list[Finding]:
    """The second content's answers under a name that meant the first's before."""
    name, prompts = bench.prompts.word(), [bench.prompts.draw() for _ in range(2)]
    party = adapters.load(name, first)
    try:
        old = [bench.client.ask(party, prompt) for prompt in prompts]
        party = change(name)
        new = [bench.client.ask(party, prompt) for prompt in prompts]
        # What the second content says is asked of a name that never meant anything else.
        with adapters.under(bench.prompts.word(), adapters.second) as reference:
            return [
                finding
                for prompt, before, got in zip(prompts, old, new, strict=True)
                for finding in (
                    bench.judge.by_cached(party, prompt, got),
                    bench.judge.by_outputs(reference, prompt, got, before),
                )
            ]
    finally:
        adapters.unload(name)


def _from_one_path(bench: Bench, adapters: LoadedAdapters, scratch: str | None) -> CheckRow:
    check, how = "other content under one name", "in the same folder"
    if scratch is None:
        why = "give a folder that kit and server can both open with --scratch"
        return CheckRow(check, how, (not_judged(why),))
    folder = Path(scratch) / bench.prompts.word()

    def put(content: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(content, folder)

    def change(name: str) -> Party:
        put(adapters.second)
        return adapters.load(name, str(folder), in_place=True)

    def run() -> list[Finding]:
        put(adapters.first)
        try:
            return _reloaded(bench, adapters, str(folder), change)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    try:
        return row(check, how, run)
    except OSError as error:
        return CheckRow(check, how, (not_judged(f"the folders can't be copied here: {error}"),))


def look_alikes(word: str) -> dict[str, tuple[str, str]]:
    """Pairs of texts that are one after folding or normalising; `word` makes them new."""
    return {
        "case": (f"{word}-a", f"{word}-A"),
        "composed and decomposed": (
            unicodedata.normalize("NFC", f"{word}-é"),
            unicodedata.normalize("NFD", f"{word}-é"),
        ),
        "full width": (f"{word}-b", f"{word}-\uff42"),
        "a space at the end": (f"{word}-c", f"{word}-c "),
    }


def naming(bench: Bench, adapters: LoadedAdapters) -> list[CheckRow]:
    """Names that look alike mean what was loaded under them, or nothing."""
    try:
        if _is_answered(bench, adapters.party(bench.prompts.word())):
            why = "the server answers for names that mean nothing"
            return [CheckRow("names of adapters", "all", (not_judged(why),))]
    except RefusedError as error:
        return [CheckRow("names of adapters", "all", (not_judged(str(error)),))]
    pairs = look_alikes(bench.prompts.word())
    return [
        row("names of adapters", kind, partial(_named_alike, bench, adapters, *pair))
        for kind, pair in pairs.items()
    ]


def _is_answered(bench: Bench, party: Party) -> bool:
    try:
        bench.client.ask(party, bench.prompts.draw(), max_tokens=1)
    except RefusedError as error:
        if error.status not in (400, 404, 422):  # of the name, not of the key or the connection
            raise
        return False
    return True


def _named_alike(bench: Bench, adapters: LoadedAdapters, one: str, other: str) -> list[Finding]:
    taken = []
    for name, folder in ((one, adapters.first), (other, adapters.second)):
        with contextlib.suppress(RefusedError):
            taken.append(adapters.load(name, folder))
    try:
        if len(taken) == 2:
            return _both_named(bench, adapters, *taken)
        refused = [name for name in (one, other) if name not in {party.model for party in taken}]
        return [_refused_name(bench, adapters, name) for name in refused]
    finally:
        for party in taken:
            with contextlib.suppress(RefusedError):  # names that are one are unloaded once
                adapters.unload(party.model)


def _both_named(bench: Bench, adapters: LoadedAdapters, one: Party, other: Party) -> list[Finding]:
    prompt = bench.prompts.draw()
    answers = [bench.client.ask(party, prompt) for party in (one, other)]
    findings = [bench.judge.by_cached(other, prompt, answers[1])]
    folders = (adapters.first, adapters.second)
    for folder, got, its in zip(folders, answers, answers[::-1], strict=True):
        with adapters.under(bench.prompts.word(), folder) as reference:
            findings.append(bench.judge.by_outputs(reference, prompt, got, its))
    return findings


def _refused_name(bench: Bench, adapters: LoadedAdapters, name: str) -> Finding:
    """A name that could not be loaded must not be answered, either."""
    if _is_answered(bench, adapters.party(name)):
        return Finding("names", Verdict.LEAK, f"{name!r} was not loaded, and is answered")
    return Finding("names", Verdict.APART, f"{name!r} is refused")
