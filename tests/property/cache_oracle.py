"""The cache against a dictionary, rule by rule (R02).

A walk is drawn by a seed, before anything of it is carried out, so that it means the same whatever
else is loaded or has run. One that fails is made as short as it can be and told as code that
replays it. `test_oracle` runs some of them, `oracle_soak` as many as are asked for.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache as memoized
from itertools import product
from typing import NamedTuple

import numpy as np

from manyroots.cache.events import PagesStored
from manyroots.cache.families.family import Family
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keeping import Keep
from manyroots.cache.keys import Owner, PageHasher, PrefixKey
from manyroots.cache.outcomes import Ending, PlaneStats, Refusal
from manyroots.cache.planes import ABSENT, Capacity, Plane
from manyroots.cache.policies import FREE_LOADS, CachePolicies, LoadCosts, WriteBack
from manyroots.cache.prefetch import MOST_QUESTIONS, Share, Ticket
from manyroots.cache.quick_audit import QuickAudit
from manyroots.ids import CopyId, Namespace, StepId, Tier
from manyroots.step import Copy
from tests.helpers.cache_harness import (
    ADAPTER_A,
    BASE,
    CacheHarness,
    Content,
    Path,
    Sequence,
    Step,
    content_of,
    ints,
    longest,
    needed_pages,
    path_of,
    recurrent,
    resident,
    window,
)

NUM_CALLS = 200
MOST_TOKENS = 12
MOST_PROMPT = 10
MOST_MISSES = 300
"""Tries in a row that make a failing walk no shorter."""
SALTED = Namespace(adapter=ADAPTER_A.adapter, salt="tenant")
NAMESPACES = (BASE, ADAPTER_A, SALTED)
NUM_KEYS = 5
"""See `Machine.key`."""
MIXES = (
    ("full",), ("full", "window"), ("full", "recurrent"), ("full", "window", "recurrent"),
    ("window",), ("recurrent",), ("window", "wide"), ("full", "window", "wide"),
)  # fmt: skip
ACTIONS = (
    *["plan"] * 6, *["claim"] * 5, *["commit"] * 5, *["acknowledge"] * 5, *["release"] * 5,
    *["onboard"] * 3, *["prefetch"] * 2, *["guess"] * 2, *["keep"] * 2, "let_go", "lookup", "fail",
    "evict_namespace",
)  # fmt: skip
PATTERNS = (0, 0b1111111111, 0b10000, 0b1111110011)
Entry = tuple[int, Path]
Resident = dict[Entry, int]


class Setting(NamedTuple):
    """What a walk's cache is made of; small numbers, to be read by `Machine`."""

    mix: tuple[str, ...]
    page_size: int
    device: int
    host: int
    write_back: WriteBack
    size: int
    options: int
    has_warm_storage: bool = False
    """Whether storage has every prompt's pages at the start, as a restarted server finds it."""


class Call(NamedTuple):
    """One call, of whatever it turns out to fit; see `Machine.act`."""

    action: str
    a: int
    b: int
    c: int


@dataclass(frozen=True)
class Walk:
    """Calls in an order."""

    setting: Setting
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, seed: int, num_calls: int = NUM_CALLS) -> Walk:
        rng = random.Random(seed)
        setting = Setting(
            mix=rng.choice(MIXES),
            page_size=rng.choice((1, 2)),
            device=rng.randint(0, 7),
            host=rng.choice((0, 4, 9, 20)),
            write_back=rng.choice(tuple(WriteBack)),
            size=rng.randint(0, 11),
            options=rng.randint(0, 7),
        )
        calls = [
            Call(
                rng.choice(ACTIONS),
                rng.randint(0, 15),
                rng.randint(0, 255),
                rng.randint(1, MOST_PROMPT),
            )
            for _ in range(num_calls)
        ]
        walk = cls(setting, tuple(calls))
        # Draws of its own: the other walks are those that their seeds gave before.
        warm = random.Random(f"has_warm_storage {seed}")
        return walk._warmed(warm) if warm.random() < 0.25 else walk

    def _warmed(self, rng: random.Random) -> Walk:
        """With storage that has pages, more questions to it, and a device that evicts more."""
        setting = self.setting._replace(
            device=rng.randint(0, 2),
            host=self.setting.host or 9,
            options=self.setting.options | 1,
            has_warm_storage=True,
        )
        calls = [
            call._replace(action="prefetch") if rng.random() < 0.1 else call for call in self.calls
        ]
        return Walk(setting, tuple(calls))

    def run(self, whole_audit_every: int = 1) -> Machine:
        """`whole_audit_every`: see `QuickAudit`."""
        machine = Machine(self.setting, whole_audit_every)
        for call in self.calls:
            machine.act(*call)
        machine.finish()
        return machine

    def failure(self) -> Exception | None:
        """What is wrong, if anything."""
        try:
            self.run()
        except Exception as error:
            return error
        return None

    def shortest(self) -> Walk:
        """Few of its calls that fail in the same way. Leaves out a run of them or one to three
        others at random, until many tries in a row find nothing. A call means something else
        without one before it, so leaving out calls one by one stops early."""
        wanted, calls = _place_of(self.failure()), self.calls
        assert wanted is not None
        rng, num_misses = random.Random(0), 0
        while calls and num_misses < MOST_MISSES:
            left_out: Collection[int] = rng.choices(range(len(calls)), k=rng.randint(1, 3))
            if rng.random() < 0.5:
                begin = rng.randrange(len(calls))
                left_out = range(begin, begin + rng.randint(1, 1 + len(calls) // 4))
            fewer = tuple(call for i, call in enumerate(calls) if i not in left_out)
            num_misses += 1
            if _place_of(Walk(self.setting, fewer).failure()) == wanted:
                calls, num_misses = fewer, 0
        return Walk(self.setting, calls)

    def __str__(self) -> str:
        """As code that replays it."""
        setting = repr(self.setting).replace(
            repr(self.setting.write_back), str(self.setting.write_back)
        )
        calls = "".join(f"    {call!r},\n" for call in self.calls)
        return f"Walk({setting}, (\n{calls})).run()"


def _place_of(error: Exception | None) -> tuple[str, int] | None:
    """Where it was raised. Messages may hold addresses, which differ every time."""
    if error is None:
        return None
    where = traceback.extract_tb(error.__traceback__)[-1]
    assert where.lineno is not None
    return where.filename, where.lineno


@memoized
def page_hash(path: Path, page_size: int) -> bytes:
    hasher = PageHasher(b"model", page_size * 4)
    if not path:
        return hasher.root
    owner, tokens = path[-1]
    [found] = hasher.chain(page_hash(path[:-1], page_size), owner, tokens)
    return found


def family(name: str, page_size: int, size: int) -> Family:
    if name == "full":
        return FULL_ATTENTION
    if name == "recurrent":
        return recurrent(1 + size % 3)
    return window(2 + size % 3 if name == "window" else 5 + size % 3, page_size, name)


class Machine:
    """Any calls that a scheduler could make, in any order; checked against plain dictionaries."""

    def __init__(self, setting: Setting, whole_audit_every: int = 1) -> None:
        mix, page_size, device, host, write_back, size, options, is_warm = setting
        pages = 1 + 6 // page_size + device
        self.ran: Counter[str] = Counter()
        """How often each rule ran."""
        self.policies = CachePolicies(
            write_back=write_back,
            load_costs=LoadCosts(1.0, 0.1) if options == 7 else FREE_LOADS,
            uses_storage=bool(host) and bool(options & 1),
            records_events=bool(options & 2),
            identity=b"model",
        )
        self.hand = CacheHarness(
            *(Capacity(family(name, page_size, size), 2 + device if name == "recurrent" else pages,
                       host) for name in mix),
            page_size=page_size,
            policies=self.policies,
        )  # fmt: skip
        self.cache, self.layout = self.hand.cache, self.hand.layout
        if is_warm:
            self.hand.storage |= self.pages_of_prompts()
        self.audit = QuickAudit(self.cache, whole_audit_every)
        self.sequences: list[Sequence] = []
        self.announced: dict[StepId, Resident] = {}
        self.found: dict[StepId, set[tuple[int, Path]]] = {}
        """By step under way: what could be found when it had been planned."""
        self.leans: dict[int, set[StepId]] = {}
        """By sequence that has not begun: launched steps that fill what it found."""
        self.barred: dict[int, set[Namespace]] = {}
        """By sequence: namespaces that were evicted since it began."""
        self.asked: dict[int, set[Namespace]] = {}
        """By copy from storage: namespaces that were evicted since it was asked for."""
        self.copied: dict[int, list[Path | None]] = {}
        """By copy: what it copies."""
        self.answered: dict[CopyId, tuple[Copy, list[bool]]] = {}
        """By copy that has ended: how, till it is settled."""
        self.unsure: set[Path] = set()
        """Of those: paths that lost something while it was under way."""
        self.kept: list[tuple[Keep, Resident]] = []
        """What is kept for those that wait."""
        self.mirror: dict[Tier, dict[bytes, Path]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self.now: Resident = {}
        self.was_held: set[tuple[int, int, int, int]] = set()

    def act(self, action: str, a: int, b: int, c: int) -> None:
        """One call: the action, if it is possible now, or else what leads on to where it is."""
        if any(len(s.tokens) > MOST_TOKENS for s in self.sequences):
            lengths = [len(s.tokens) for s in self.sequences]
            self.release(lengths.index(max(lengths)), finished=True)
        elif action == "claim" and len(self.sequences) < 4:
            self.claim((0, 0, 0, 0, 1, 2, 3, 4)[a % 8], b, c)
        elif action == "commit" and self.hand.steps:
            self.commit()
        elif action == "acknowledge" and self.hand.under_way:
            self.acknowledge(a, (255, 255, 255, 255, b, 0)[c % 6])
        elif action == "onboard" and any(s.held.onboarding for s in self.sequences):
            self.onboard(a)
        elif action == "release" and self.sequences:
            self.release(a, finished=b % 3 > 0)
        elif action == "fail" and self.hand.steps and b < 128:
            self.fail()
        elif action == "evict_namespace" and b < 64:
            self.evict_namespace(NAMESPACES[a % 3])
        elif action == "prefetch" and self.policies.uses_storage:
            self.prefetch(
                a % NUM_KEYS, b, c, (Share.ANY, Share.WHOLE, Share.WHOLE, Share.NONE)[a % 4]
            )
        elif action == "keep" and self.layout.host and len(self.kept) < 4:
            self.keep((0, 0, 0, 0, 1, 2, 3, 4)[a % 8], b, c)
        elif action == "let_go" and self.kept:
            self.let_go(a)
        elif action == "guess" and self.guessing():
            self.guess(a, [b >> i & 1 for i in range(1 + c % 4)])
        elif action == "lookup":
            self.lookup(a % NUM_KEYS, b, c)
        elif len(self.hand.steps) > 1:
            self.commit()
        elif not any(s.held.is_ready for s in self.sequences) and len(self.sequences) < 4:
            self.claim(0, b, c)
        else:
            self.plan(a, (1, 3, 100, 100)[b % 4])

    # What a scheduler could do

    def lookup(self, key: int, bits: int, count: int) -> None:
        tokens = prompt(bits, count)
        match = self.cache.lookup(self.key(key), ints(*tokens))
        on_device, anywhere = self.naive(self.key(key), tokens)
        assert (match.num_device_pages, match.num_pages) == (on_device, anywhere)
        lost, gained = self.changed("lookup")
        assert not lost
        assert not gained

    def claim(self, key: int, bits: int, count: int) -> None:
        tokens = prompt(bits, count)
        on_device, anywhere = self.naive(self.key(key), tokens)
        is_free = self.policies.load_costs is FREE_LOADS
        num_wanted = len(tokens) + 1
        has_room = self.cache.has_room_for(num_wanted)
        sequence = self.hand.claim(self.key(key), tokens)
        lease = sequence.held
        could_reach = self.cache.can_reach(lease, lease.num_cached_tokens, num_wanted, num_wanted)
        assert could_reach or not has_room, "there is less room after the lookup than before it"
        found = (anywhere if is_free else on_device) * self.hand.page_size
        assert sequence.num_computed == found
        assert sequence.held.num_host_tokens == found - min(
            found, on_device * self.hand.page_size
        )  # fmt: skip
        self.sequences.append(sequence)
        self.barred[id(sequence)] = set()
        mine = self.held(sequence)
        self.leans[id(sequence)] = {
            step.step_id
            for step in self.hand.steps
            if mine & {(plane, unit) for (plane, _), unit in self.announced[step.step_id].items()}
        }
        lost, gained = self.changed("claim")
        assert not gained
        self.only_host_pressure(lost)

    def onboard(self, index: int) -> None:
        waiting = [s for s in self.sequences if s.held.onboarding]
        sequence = waiting[index % len(waiting)]
        host, on_their_way = len(self.layout.device), self.cache.transfers.loading
        wanted = Counter(
            family for family, _, unit in sequence.held.onboarding
            if (host + family, unit) not in on_their_way
        )  # fmt: skip
        before = self.cache.stats()
        passed = self.passed_states()
        has_room = all(
            before.planes[f].num_free + before.planes[f].num_cached + passed[f] >= n
            for f, n in wanted.items()
        )
        refusal = self.cache.onboard(sequence.held)
        assert (refusal is None) == has_room
        lost, gained = self.changed("onboard")
        assert not gained
        if refusal is not None:
            assert self.cache.stats() == before
            assert not lost
        elif all(before.planes[f].num_free >= n for f, n in wanted.items()):
            assert not lost, "evicted with room to spare"

    def passed_states(self) -> Counter[int]:
        """By family: requests that hold the two newest states of their output. The older one is
        room for others."""
        found = Counter(
            (lease.serial, saved.family)
            for lease in self.cache.open_leases.values() for saved in lease.checkpoints
            if saved.boundary * self.hand.page_size > lease.num_prompt_tokens
        )  # fmt: skip
        return Counter(family for (_, family), count in found.items() if count > 1)

    def plan(self, chosen: int, most: int) -> None:
        self.drop_failed()
        ready = [
            s for i, s in enumerate(self.sequences)
            if s.held.is_ready and (chosen >> i & 1 or chosen % 5 == 0)
            and s.held.num_sure_tokens is None
        ]  # fmt: skip
        before = [plane.num_free for plane in self.cache.stats().planes]
        self.planned(self.hand.plan(*ready, most=most), before)

    def guessing(self) -> list[Sequence]:
        """Sequences that may have drafts computed now."""
        return [s for s in self.sequences if s.held.is_ready and not s.num_in_flight]

    def guess(self, index: int, drafts: list[int]) -> None:
        self.drop_failed()
        may_guess = self.guessing()
        # With states, the runner takes part in going back (`tests/unit/scheduler`).
        if not may_guess or any(plane.family.is_state for plane in self.layout.device):
            return
        sequence = may_guess[index % len(may_guess)]
        before = [plane.num_free for plane in self.cache.stats().planes]
        step = self.hand.guess(sequence, drafts)
        self.planned(step, before)

    def planned(self, step: Step, before: list[int]) -> None:
        self.note_copies(step)
        for part in step.parts:
            self.leans[id(part.sequence)] = set()
        lost, gained = self.changed("plan", step)
        self.announced[step.step_id] = gained | self.refilled(step)
        self.found[step.step_id] = set(self.now)
        self.may_publish(gained, step)
        if any(self.wanted(step, plane) > before[plane.index] for plane in self.layout.device):
            return
        if any(self.wanted(step, plane) > before[plane.index] for plane in self.layout.host):
            self.only_host_pressure(lost)
        else:
            assert not lost, "evicted with room to spare"

    def wanted(self, step: Step, plane: Plane) -> int:
        """Units that a step takes at most: for what it computes, and for what it writes back."""
        if plane.tier is Tier.HOST:
            return sum(
                len(copy.target_units) for copy in step.copies
                if copy.target is Tier.HOST and copy.family == plane.family_index
            )  # fmt: skip
        if plane.family.is_state:
            return 2 * len(step.parts)
        size = self.hand.page_size
        return sum(-(-(p.end + len(p.drafts)) // size) - p.begin // size for p in step.parts)

    def commit(self) -> None:
        step = self.hand.steps[0]
        full = {}
        for part in step.parts:
            sequence = part.sequence
            if sequence.lease is not None:
                published = sequence.lease.num_published_pages
                full[id(sequence)] = (published, [list(t) for t in sequence.lease.tables])
        self.hand.commit()
        lost, gained = self.changed("commit")
        self.may_publish(gained, step)
        self.only_host_pressure(lost)
        for part in step.parts:
            if part.sequence.lease is not None:
                self.must_be_there(part.sequence, part.end, *full[id(part.sequence)])
        del self.announced[step.step_id], self.found[step.step_id]
        for steps in self.leans.values():
            steps.discard(step.step_id)

    def fail(self) -> None:
        gone = {entry for announced in self.announced.values() for entry in announced.items()}
        failed = set(self.announced)
        for sequence in self.hand.fail():
            self.sequences.remove(sequence)
        lost, gained = self.changed("fail")
        assert not gained
        assert not gone & set(self.now.items()), "a failed step's pages can be found"
        roots = {path for (_, path), _ in gone}
        for entry in lost:
            path = entry[1]
            # Its nodes go as a whole, with what others have put above its own pages since.
            is_above = any(
                entry not in self.found[step] and any(own[: len(path)] == path for _, own in mine)
                for step, mine in self.announced.items()
            )
            is_below = any(path[:n] in roots for n in range(1, len(path) + 1))
            assert is_above or is_below, "lost without a reason"
        self.announced.clear()
        self.found.clear()
        for sequence in list(self.sequences):
            # A scheduler must let go of those that have not begun, but count on what has failed.
            if self.leans[id(sequence)] & failed:
                self.drop(sequence, Ending.DROPPED)

    def release(self, index: int, *, finished: bool) -> None:
        sequence = self.sequences[index % len(self.sequences)]
        if finished and not sequence.num_in_flight:
            self.drop(sequence, Ending.FINISHED)
        else:
            self.drop(sequence, Ending.DROPPED)
        lost, gained = self.changed("release")
        self.only_host_pressure(self.without_promised_states(lost))
        assert finished or not gained
        for plane, path in gained:
            assert self.layout.planes[plane].family.is_state
            assert not self.barred[id(sequence)] & {owner.namespace for owner, _ in path}

    def without_promised_states(self, lost: Resident) -> Resident:
        """A request that is dropped takes back the states that its launched steps will save."""
        promised = {entry for announced in self.announced.values() for entry in announced.items()}
        return {
            entry: unit for entry, unit in lost.items()
            if (entry, unit) not in promised or not self.layout.planes[entry[0]].family.is_state
        }  # fmt: skip

    def evict_namespace(self, namespace: Namespace) -> None:
        before = self.cache.stats().planes
        evicted = self.cache.evict_namespace(namespace)
        kept = {
            entry: unit for entry, unit in self.now.items()
            if all(owner.namespace != namespace for owner, _ in entry[1])
        }  # fmt: skip
        self.changed("evict_namespace")
        assert self.now == kept
        freed = tuple(
            a.num_free - b.num_free for a, b in zip(self.cache.stats().planes, before, strict=True)
        )
        assert evicted.num_freed == freed
        for sequence in self.sequences:
            self.barred[id(sequence)].add(namespace)
        for evicted_since in self.asked.values():
            evicted_since.add(namespace)

    def acknowledge(self, index: int, arrived: int) -> None:
        copies = [copy for copy, _ in self.hand.under_way.values()]
        copy = copies[index % len(copies)]
        count = max(len(copy.source_units), len(copy.target_units))
        contents = self.hand.under_way[copy.copy_id][1]
        good = [bool(arrived >> i % 8 & 1) and contents[i] != () for i in range(count)]
        known = {path[:n] for _, path in self.now for n in range(1, len(path) + 1)}
        needs = {i: self.cache.transfers.waits_for(i) for i in self.answered}
        if copy.source is Tier.STORAGE:
            tickets = self.cache.prefetcher.tickets()
            ticket = next(ticket for ticket in tickets if copy.copy_id in ticket.units)
            self.hand.acknowledge(copy, good)
            self.note_questions(ticket, self.asked[copy.copy_id])
        else:
            needs[copy.copy_id] = self.cache.transfers.waits_for(copy.copy_id)
            self.hand.acknowledge(copy, good)
        lost, gained = self.changed("acknowledge")
        self.answered[copy.copy_id] = (copy, good)
        ended = self.answered.keys()
        waiting = {other for others in needs.values() for other in others} - ended
        while late := {i for i in needs.keys() - waiting if needs[i] & waiting}:
            waiting |= late
        settled = sorted(ended - waiting)
        if settled:
            self.check_arrival([self.answered.pop(i) for i in settled], known, lost, gained)
        else:
            assert not lost
            assert not gained, "found before a copy that it waits for has arrived"
        self.drop_failed()

    def note_questions(self, ticket: Ticket, evicted: set[Namespace]) -> None:
        """An answer may lead to a question for states, of no more than was asked for."""
        assert ticket.num_questions <= MOST_QUESTIONS
        for copy_id, (plane, units) in ticket.units.items():
            if copy_id not in self.asked and copy_id not in ticket.arrived:
                assert plane.family.is_state
                assert 0 <= ticket.begins[copy_id] < len(ticket.asked)
                assert 0 < len(units) <= len(ticket.asked) - ticket.begins[copy_id]
                self.asked[copy_id] = evicted

    def prefetch(self, key: int, bits: int, count: int, room: Share) -> None:
        tokens = prompt(bits, count)
        own = self.wanted_of_host(self.key(key), tokens)
        before = self.cache.stats().planes
        reserved = {plane.index: self.reserved(plane.index) for plane in self.layout.host}
        loose = {plane.index: self.loose(plane.index) for plane in self.layout.host}
        ticket = self.cache.prefetch(self.key(key), ints(*tokens), room)
        if ticket is not None:
            evicted: set[Namespace] = set()
            self.asked |= dict.fromkeys(ticket.units, evicted)
            if ticket.leader is None and room is Share.WHOLE:
                self.check_room(ticket, own, before, reserved, loose)
            assert room is not Share.NONE or not ticket.units
            if ticket.kept is not None:
                self.kept.append((ticket.kept, own))
        lost, gained = self.changed("prefetch")
        assert not gained
        self.only_host_pressure(lost)

    def check_room(
        self, ticket: Ticket, own: Resident, before: tuple[PlaneStats, ...],
        reserved: dict[int, set[int]], loose: dict[int, set[int]],
    ) -> None:  # fmt: skip
        """All of it or nothing, and nothing only where there is no room beside what others keep."""
        num_pages = len(ticket.keys) // (4 * self.hand.page_size)
        assert len(ticket.asked) == (num_pages if ticket.refusal is None else 0)
        is_too_large, has_room = False, True
        is_led = any(plane.family.is_ordered for plane in self.layout.host)
        for plane in self.layout.host:
            mine = {unit for (index, _), unit in own.items() if index == plane.index}
            counts, taken = before[plane.index], reserved[plane.index] | mine
            # What is its own and lies loose is not for the answer.
            room = counts.num_free + counts.num_cached - len(mine & loose[plane.index])
            wanted = num_pages
            if plane.family.is_state and is_led:  # one state is enough
                wanted = max(1, min(wanted, room, 3 * plane.num_units // 4 - len(taken)))
            is_too_large |= len(mine) + wanted > plane.num_units
            has_room &= wanted <= room
            has_room &= taken == mine or 4 * (len(taken) + wanted) <= 3 * plane.num_units
        if is_too_large:
            assert ticket.refusal is Refusal.TOO_LARGE
        else:
            assert ticket.refusal is (None if has_room else Refusal.NO_ROOM)

    def keep(self, key: int, bits: int, count: int) -> None:
        tokens = prompt(bits, count)
        wanted = self.wanted_of_host(self.key(key), tokens)
        keep = self.cache.keep(self.key(key), ints(*tokens))
        units = {(plane, unit) for plane, units in keep.units.items() for unit in units.tolist()}
        assert units == {(plane, unit) for (plane, _), unit in wanted.items()}
        self.kept.append((keep, wanted))
        lost, gained = self.changed("keep")
        assert not lost
        assert not gained

    def let_go(self, index: int) -> None:
        keep, _ = self.kept.pop(index % len(self.kept))
        self.cache.let_go(keep)
        lost, gained = self.changed("let_go")
        assert not lost
        assert not gained

    def finish(self) -> None:
        """All sequences end, and nothing is left over."""
        while self.hand.steps:
            self.hand.commit()
        for sequence in list(self.sequences):
            self.drop(sequence, Ending.FINISHED)
        self.hand.settle()
        for keep, _ in self.kept:
            self.cache.let_go(keep)
        self.audit.audit()
        for plane in self.cache.stats().planes:
            assert plane.num_held == 0, "held, and no sequence is left"

    # What must hold

    def changed(self, name: str, step: Step | None = None) -> tuple[Resident, Resident]:
        """What can be found no more and what can be found now, after a rule; checks the rest.

        `step`: what the rule planned. It may evict a page and compute it again in the same unit,
        so that the page is lost and gained at once.
        """
        self.ran[name] += 1
        before, self.now = self.now, resident(self.cache)
        self.audit.audit()
        self.check_contents()
        self.check_events()
        lost: Resident = {}
        gained: Resident = {}
        if before != self.now:  # a lookup changes nothing
            lost = {e: unit for e, unit in before.items() if self.now.get(e) != unit}
            gained = {e: unit for e, unit in self.now.items() if before.get(e) != unit}
        if step is not None:
            again = {e: u for e, u in self.refilled(step).items() if before.get(e) == u}
            lost |= again
            gained |= again
        copied = {path for paths in self.copied.values() for path in paths if path}
        self.unsure &= copied
        self.unsure |= {p for p in copied if any(p[: len(path)] == path for _, path in lost)}
        held = {
            (id(s), f, page, unit)
            for s in self.sequences
            for f, table in enumerate(s.held.tables)
            for page, unit in enumerate(table)
        }
        kept, self.was_held = {(f, u) for _, f, _, u in held & self.was_held}, held
        if name in ("claim", "onboard", "plan", "commit", "prefetch", "release"):
            for (plane, _), unit in lost.items():
                assert (plane, unit) not in kept, "evicted from under a request"
            self.check_kept(lost)
        return lost, gained

    def check_kept(self, lost: Resident) -> None:
        """Units kept for a waiting request are evicted only together with a page before them that
        lost what it needs: if that was on the device alone, no request kept it."""
        held = {pair for keep, entries in self.kept if keep.units for pair in entries.items()}
        ordered = {plane.index for plane in self.layout.planes if plane.family.is_ordered}
        cuts = {entry[1] for entry, unit in lost.items()
                if entry[0] in ordered and (entry, unit) not in held}  # fmt: skip
        for (plane, path), _ in held & lost.items():
            end = len(path) + (plane not in ordered)
            is_cut = any(path[:n] in cuts for n in range(1, end))
            assert is_cut, "evicted while it was kept for a request"

    def wanted_of_host(self, key: PrefixKey, tokens: list[int]) -> Resident:
        """What the host has of all that a request would resume from now."""
        on_device, anywhere = self.naive(key, tokens)
        boundary = anywhere if self.policies.load_costs is FREE_LOADS else on_device
        size, found = self.hand.page_size, {}
        for plane in self.layout.device if boundary else ():
            for page in needed_pages(plane.family, boundary, size):
                entry = (
                    plane.index + len(self.layout.device),
                    path_of(key, tokens, page + 1, size),
                )
                if entry in self.now:
                    found[entry] = self.now[entry]
        return found

    def reserved(self, plane: int) -> set[int]:
        """Units that are kept for a request, or that an answer of storage is to fill."""
        kept = [units.tolist() for k, _ in self.kept for p, units in k.units.items() if p == plane]
        tickets = self.cache.prefetcher.tickets()
        asked = [u.tolist() for t in tickets for p, u in t.units.values() if p.index == plane]
        return {unit for units in kept + asked for unit in units}

    def loose(self, plane: int) -> set[int]:
        """Units without a holder."""
        return set(np.flatnonzero(self.cache.index.pools[plane].holders == 0).tolist())

    def check_contents(self) -> None:
        promised = {
            (plane, unit)
            for announced in self.announced.values()
            for (plane, _), unit in announced.items()
        }
        for step in self.hand.steps:  # the newest may not be noted yet
            for part in step.parts:
                for plane in self.layout.device:
                    promised.update((plane.index, unit) for unit in part.tables[plane.index])
            for copy in step.copies:
                if copy.is_after_model:
                    promised.update((copy.family, int(unit)) for unit in copy.target_units)
        for (index, path), unit in self.now.items():
            if (index, unit) not in promised:
                expected = content_of(path, self.layout.planes[index].family.is_state)
                assert self.hand.read(index, unit) == expected, f"unit {unit} holds something else"

    def check_events(self) -> None:
        if not self.policies.records_events:
            return
        size = self.hand.page_size
        for event in self.cache.take_events():
            there = self.mirror[event.tier]
            if not isinstance(event, PagesStored):
                for digest in event.hashes:
                    path = there.pop(digest)
                    assert path[-1][0] == (event.namespace, event.begin)
                continue
            for i, digest in enumerate(event.hashes):
                assert digest not in there, "stored twice"
                tokens = event.tokens[i * size * 4 : (i + 1) * size * 4]
                there[digest] = ((Owner(event.namespace, event.begin), tokens),)
        spine = [p for p in self.layout.planes if p.family.is_ordered] or [*self.layout.planes]
        for tier, there in self.mirror.items():
            first = next((plane.index for plane in spine if plane.tier is tier), None)
            expected = {
                page_hash(path, size): path[-1:] for plane, path in self.now if plane == first
            }
            assert there == expected, f"a consumer of the events sees something else on {tier}"

    def may_publish(self, gained: Resident, step: Step) -> None:
        allowed = set()
        for part in step.parts:
            sequence = part.sequence
            whole = self.allowed(sequence, part.end // self.hand.page_size)
            allowed |= {self.path(sequence, n) for n in range(1, whole + 1)}
        for plane, path in gained:
            assert self.layout.planes[plane].tier is Tier.DEVICE
            assert path in allowed, "published what was never computed, or was evicted"

    def must_be_there(
        self, sequence: Sequence, end: int, published: int, tables: list[list[int]]
    ) -> None:
        """What a commit makes findable."""
        whole = self.allowed(sequence, end // self.hand.page_size)
        if whole <= published:
            return
        for plane in self.layout.device:
            if plane.family.is_state:
                continue
            for page in range(published, whole):
                if tables[plane.index][page] != ABSENT:
                    assert (plane.index, self.path(sequence, page + 1)) in self.now, "not published"

    def check_arrival(
        self, answers: list[tuple[Copy, list[bool]]], known: set[Path], lost: Resident,
        gained: Resident,
    ) -> None:  # fmt: skip
        """Copies that are settled together have ended."""
        first = len(self.layout.device) if answers[0][0].target is Tier.HOST else 0
        if len(answers) > 1:
            assert len({copy.target for copy, _ in answers}) == 1
            families = {copy.family + first for copy, _ in answers}
            assert {plane for plane, _ in gained} <= families
        for family in {copy.family for copy, _ in answers}:
            mine = [(copy, good) for copy, good in answers if copy.family == family]
            plane = family + first
            ours = {e: unit for e, unit in gained.items() if e[0] == plane}
            is_alone = len(answers) == 1
            self.check_family(mine, known, lost, gained if is_alone else ours)

    def check_family(
        self, answers: list[tuple[Copy, list[bool]]], known: set[Path], lost: Resident,
        gained: Resident,
    ) -> None:  # fmt: skip
        copy = answers[0][0]
        good = [ok for _, answer in answers for ok in answer]
        target = next(
            (p.index for p in self.layout.planes
             if p.tier is copy.target and p.family_index == copy.family), None
        )  # fmt: skip
        if copy.source is Tier.STORAGE:
            self.only_room_for_states(lost)
            evicted = self.asked.pop(copy.copy_id)
            for plane, path in gained:
                assert self.layout.planes[plane].tier is Tier.HOST
                assert not evicted & {owner.namespace for owner, _ in path}
            return
        paths = [path for each, _ in answers for path in self.copied.pop(each.copy_id)]
        if target is None:
            assert not lost
            assert not gained
            return
        assert all(plane == target for plane, _ in gained)
        arrived = {path for path, ok in zip(paths, good, strict=True) if ok}
        # None: the source was distrusted while it was read; what was read from it counts.
        assert None in arrived or {path for _, path in gained} <= arrived
        if copy.target is Tier.HOST:
            for certain in arrived & known - self.unsure:
                assert (target, certain) in self.now, "a copy arrived and can't be found"
        if all(good) or copy.target is Tier.HOST:
            assert not lost
        bad = [path for path, ok in zip(paths, good, strict=True) if not ok and path is not None]
        for _, gone in lost:
            assert any(gone[: len(path)] == path for path in bad), "lost without a reason"

    def only_host_pressure(self, lost: Resident) -> None:
        """Only room on the host was made, if any: the device loses nothing that reads all."""
        assert not lost or self.layout.host
        for plane, _ in lost:
            assert not self.layout.planes[plane].is_ordered

    def only_room_for_states(self, lost: Resident) -> None:
        """An answer of storage evicts only for the next question, which is for states."""
        for plane, _ in lost:
            assert self.layout.planes[plane].tier is Tier.HOST
            assert self.layout.planes[plane].family.is_state
        self.check_kept(lost)

    def naive(self, key: PrefixKey, tokens: list[int]) -> tuple[int, int]:
        """The longest boundary from the device alone, and with the host's help."""

        def on_device(plane: int, path: Path) -> bool:
            return (plane, path) in self.now

        def anywhere(plane: int, path: Path) -> bool:
            return (plane, path) in self.now or (plane + len(self.layout.device), path) in self.now

        return (
            longest(self.layout, key, tokens, on_device),
            longest(self.layout, key, tokens, anywhere),
        )

    def refilled(self, step: Step) -> Resident:
        """What a step publishes in units that held the very same pages or states before."""
        size = self.hand.page_size
        entries = [
            ((plane.index, self.path(part.sequence, page + 1)), part.tables[plane.index][page])
            for part in step.parts
            for plane in self.layout.device
            if not plane.family.is_state
            for page in range(part.begin // size, part.end // size)
        ]
        saves = {
            (copy.family, int(copy.source_units[0])): int(copy.target_units[0])
            for copy in step.copies
            if copy.is_after_model
        }
        stateful = [plane.index for plane in self.layout.device if plane.family.is_state]
        for part, family in product(step.parts, stateful):
            working = int(part.tables[family][0])
            if (family, working) in saves:
                path = self.path(part.sequence, part.end // size)
                entries.append(((family, path), saves[family, working]))
        return {entry: unit for entry, unit in entries if self.now.get(entry) == unit}

    # Odds and ends

    def pages_of_prompts(self) -> dict[tuple[int, bytes], Content]:
        """What storage has of every prompt under every key, by family and hash."""
        size = self.hand.page_size
        paths = {
            path_of(self.key(number), prompt(bits, MOST_PROMPT), num_pages, size)
            for number, bits in product(range(NUM_KEYS), range(len(PATTERNS)))
            for num_pages in range(1, 1 + MOST_PROMPT // size)
        }
        return {
            (plane.index, page_hash(path, size)): content_of(path, plane.family.is_state)
            for plane, path in product(self.layout.device, paths)
        }

    def key(self, number: int) -> PrefixKey:
        if number < len(NAMESPACES):
            return PrefixKey(NAMESPACES[number])
        size = self.hand.page_size
        # The last of them begin inside the same page, each elsewhere.
        num_base_tokens = 2 * size + number - len(NAMESPACES)
        return PrefixKey.activated(BASE, ADAPTER_A, num_base_tokens, size)

    def path(self, sequence: Sequence, num_pages: int) -> Path:
        return path_of(sequence.key, sequence.tokens, num_pages, self.hand.page_size)

    def allowed(self, sequence: Sequence, num_pages: int) -> int:
        barred = self.barred[id(sequence)]
        spaces = (sequence.key.at(page).namespace for page in range(num_pages))
        return next((page for page, space in enumerate(spaces) if space in barred), num_pages)

    def held(self, sequence: Sequence) -> set[tuple[int, int]]:
        lease = sequence.held
        units = {(f, u) for f, table in enumerate(lease.tables) for u in table if u != ABSENT}
        units |= set(lease.resumed.items()) | set(lease.states.items())
        num_device = len(self.layout.device)
        return units | {(num_device + family, unit) for family, _, unit in lease.onboarding}

    def drop(self, sequence: Sequence, ending: Ending) -> None:
        self.hand.end(sequence, ending)
        self.sequences.remove(sequence)

    def drop_failed(self) -> None:
        for sequence in list(self.sequences):
            if sequence.held.has_failed and sequence.held.is_ready:
                self.drop(sequence, Ending.DROPPED)

    def note_copies(self, step: Step) -> None:
        names = {(plane, unit): path for (plane, path), unit in self.now.items()}
        for copy in step.copies:
            if copy.source is copy.target or copy.source is Tier.STORAGE:
                continue
            at = copy.family + (copy.source is Tier.HOST) * len(self.layout.device)
            self.copied[copy.copy_id] = [names.get((at, u)) for u in copy.source_units.tolist()]


def prompt(bits: int, count: int) -> list[int]:
    """One of a few prompts that share what they begin with."""
    return [PATTERNS[bits % len(PATTERNS)] >> i & 1 for i in range(count)]
