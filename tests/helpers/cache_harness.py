"""A cache driven by hand, with a naive execute half whose memories can be wrong.

For tests of the cache alone, without a scheduler. Every unit of every family and tier holds digests
of the tokens written there, of all before them *and of the namespaces that computed them*; they are
read back through page tables as layers would, and a wrong digest raises. `resident` is what the
index holds, as a plain dictionary.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.family import Family
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.keys import Owner, PrefixKey
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import ABSENT, CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.ids import AdapterDigest, CopyId, Namespace, StepId, Tier
from manyroots.step import Copy, CopyDone, Int32s

BASE = Namespace(adapter=None, salt=None)
ADAPTER_A = Namespace(adapter=AdapterDigest(b"a" * 32), salt=None)
ADAPTER_B = Namespace(adapter=AdapterDigest(b"b" * 32), salt=None)

Path = tuple[tuple[Owner, bytes], ...]
"""A page and all before it: the owner and the tokens of each."""
Content = tuple[int | None, ...]
"""What a unit holds: a digest per token of a page, or one for a state."""


def window(size: int, page_size: int, name: str = "window") -> SlidingWindow:
    return SlidingWindow(name, size, page_size)


def recurrent(interval: int = 1) -> RecurrentState:
    return RecurrentState("recurrent", interval=interval)


def ints(*values: int) -> Int32s:
    return np.array(values, np.int32)


def path_of(key: PrefixKey, tokens: list[int], num_pages: int, page_size: int) -> Path:
    """The name of page `num_pages - 1` of a sequence."""
    tokens = tokens[: num_pages * page_size]
    told = struct.pack(f"<{len(tokens)}i", *tokens)
    size = page_size * 4
    return tuple([(key.at(i), told[i * size : (i + 1) * size]) for i in range(num_pages)])


@cache
def mark(namespace: Namespace) -> int:
    """A number for a namespace, the same in every process."""
    return zlib.crc32(repr(namespace).encode())


def mix(state: int, namespace: Namespace, token: int) -> int:
    return (state * 6364136223846793005 + mark(namespace) * 7919 + token + 1) % 2**64


def whose(owner: Owner, offset: int) -> Namespace:
    """The namespace that computed one token of a page."""
    return owner.namespace if offset >= owner.begin else owner.namespace._replace(adapter=None)


def digests(key: PrefixKey, tokens: list[int], page_size: int) -> list[int]:
    """Entry i stands for tokens[: i + 1], each with the namespace that computes it."""
    state, found = 17, []
    for position, token in enumerate(tokens):
        page, offset = divmod(position, page_size)
        state = mix(state, whose(key.at(page), offset), token)
        found.append(state)
    return found


@cache
def content_of(path: Path, is_state: bool) -> Content:
    """What a unit of this page must hold."""
    state = 17
    page: list[int] = []
    for owner, tokens in path:
        page = []
        for offset, token in enumerate(np.frombuffer(tokens, np.int32).tolist()):
            state = mix(state, whose(owner, offset), token)
            page.append(state)
    return (state,) if is_state else tuple(page)


def resident(cache: PrefixCache) -> dict[tuple[int, Path], int]:
    """(plane, page) -> unit, for everything that the index finds. Only this function reads the
    tree."""
    page_bytes = cache.page_size * 4
    paths: dict[int, Path] = {id(cache.index.tree.root): ()}
    found: dict[tuple[int, Path], int] = {}
    for node in cache.index.tree.nodes():
        assert node.owner is not None
        assert node.parent is not None
        path = paths[id(node.parent)]
        columns = [units.tolist() for units in node.units]
        for place in range(node.num_pages):
            tokens = bytes(node.keys[place * page_bytes : (place + 1) * page_bytes])
            path = (*path, (node.owner, tokens))
            for plane, column in enumerate(columns):
                if column[place] != ABSENT:
                    found[plane, path] = column[place]
        paths[id(node)] = path
    return found


def longest(
    layout: CacheLayout, key: PrefixKey, tokens: list[int], has: Callable[[int, Path], bool]
) -> int:
    """The longest boundary that every family can resume from, by trying each.

    `has` says whether a family has a page.
    """
    size = layout.page_size
    for boundary in range((len(tokens) - 1) // size, 0, -1):
        if all(_resumes(plane.family, plane.index, key, tokens, boundary, size, has)
               for plane in layout.device):  # fmt: skip
            return boundary
    return 0


def _resumes(
    family: Family, index: int, key: PrefixKey, tokens: list[int], boundary: int, size: int,
    has: Callable[[int, Path], bool],
) -> bool:  # fmt: skip
    needed = needed_pages(family, boundary, size)
    return all(has(index, path_of(key, tokens, page + 1, size)) for page in needed)


def needed_pages(family: Family, boundary: int, size: int) -> list[int]:
    """The pages that a family must have to resume at a boundary."""
    if family.is_state:
        return [boundary - 1]
    # The next token sees itself and the window - 1 before it.
    seen = getattr(family, "window", math.inf) - 1
    return [p for p in range(boundary) if (p + 1) * size > boundary * size - seen]


@dataclass(eq=False)
class Sequence:
    """A request, as a scheduler would keep it."""

    key: PrefixKey
    tokens: list[int]
    num_prompt: int
    lease: Lease | None
    num_computed: int
    """The number of computed tokens, planned steps included."""
    num_committed: int
    num_pending: int = 0
    num_in_flight: int = 0
    has_begun: bool = False

    @property
    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease


@dataclass
class Part:
    sequence: Sequence
    begin: int
    end: int
    tables: list[list[int]]
    samples: bool
    drafts: list[int] = field(default_factory=list)
    """Computed after `end`, which advances by the number of them that turn out to be right."""


@dataclass
class Step:
    step_id: StepId
    parts: list[Part] = field(default_factory=list)
    copies: tuple[Copy, ...] = ()


class CacheHarness:
    """A cache, its memories, and the steps and copies under way."""

    def __init__(
        self,
        *capacities: Capacity,
        page_size: int = 2,
        policies: CachePolicies | None = None,
        storage: dict[tuple[int, bytes], Content] | None = None,
    ) -> None:
        self.layout = CacheLayout.of(page_size, capacities or (Capacity(FULL_ATTENTION, 16),))
        self.cache = PrefixCache(self.layout, policies or CachePolicies())
        self.page_size = page_size
        self.memory: dict[tuple[int, Tier, int], list[int | None]] = {}
        self.storage = {} if storage is None else storage
        self.steps: deque[Step] = deque()
        self.under_way: dict[CopyId, tuple[Copy, list[Content]]] = {}
        self.next_step = 1

    # Requests

    def claim(self, key: PrefixKey, tokens: list[int], *, may_reuse: bool = True) -> Sequence:
        lease = self.cache.claim(key, ints(*tokens), len(tokens), may_reuse=may_reuse)
        found = lease.num_cached_tokens
        return Sequence(key, list(tokens), len(tokens), lease, found, found)

    def plan(self, *sequences: Sequence, most: int = 1000) -> Step:
        """Plan and launch the next `most` tokens of each, as far as there is room."""
        step = Step(StepId(self.next_step))
        self.next_step += 1
        for sequence in sequences:
            self._place(sequence, most, step)
        step.copies = self.cache.take_copies()
        self.steps.append(step)
        return step

    def _place(self, sequence: Sequence, most: int, step: Step) -> None:
        lease = sequence.held
        assert lease.is_ready
        assert not lease.has_failed
        begin = sequence.num_computed
        left = len(sequence.tokens) + sequence.num_pending - begin
        count = self.cache.clip(lease, begin, min(most, left))
        if isinstance(self.cache.extend(lease, begin, begin + count, step.step_id), Refusal):
            return
        self._begin(sequence)
        sequence.num_computed += count
        sequence.num_in_flight += 1
        sequence.num_pending += int(count == left)
        tables = [list(table) for table in lease.tables]
        step.parts.append(Part(sequence, begin, begin + count, tables, count == left))
        self.cache.announce(lease, ints(*sequence.tokens), sequence.num_computed, step.step_id)

    def _begin(self, sequence: Sequence) -> None:
        if not sequence.has_begun:
            sequence.has_begun = True
            self.cache.begin(sequence.held, len(sequence.tokens))

    def guess(self, sequence: Sequence, drafts: list[int]) -> Step:
        """Plan and launch a step for all known tokens of a sequence, and for guesses after them."""
        step = Step(StepId(self.next_step))
        self.next_step += 1
        lease, begin, end = sequence.held, sequence.num_computed, len(sequence.tokens)
        assert drafts
        assert not sequence.num_pending
        got = self.cache.draft(lease, begin, end, end + len(drafts), step.step_id)
        if not isinstance(got, Refusal):
            self._begin(sequence)
            sequence.num_computed = end
            sequence.num_in_flight += 1
            sequence.num_pending += 1
            tables = [list(table) for table in lease.tables]
            step.parts.append(Part(sequence, begin, end, tables, True, list(drafts)))
            guessed = ints(*sequence.tokens, *drafts)
            self.cache.announce(lease, guessed, len(guessed), step.step_id)
        step.copies = self.cache.take_copies()
        self.steps.append(step)
        return step

    def _check_drafts(self, part: Part) -> None:
        """Accept drafts up to the first that differs from the model's choice."""
        sequence = part.sequence
        while part.drafts and part.drafts[0] == self.next_token(sequence):
            sequence.tokens.append(part.drafts.pop(0))
            part.end += 1
        sequence.num_computed = part.end

    def next_token(self, sequence: Sequence) -> int:
        """The model's next token after all known tokens."""
        return self.digests(sequence)[-1] >> 33 & 1

    def commit(self) -> Step:
        """The oldest step runs, and succeeds."""
        step = self.steps.popleft()
        self._begin_copies(step, is_after_model=False)
        for part in step.parts:
            self._check_state(part)
            self._write(part)
        for part in step.parts:
            self._check_pages(part)
        self._begin_copies(step, is_after_model=True)
        self.cache.commit_step(step.step_id)
        for part in step.parts:
            sequence = part.sequence
            sequence.num_in_flight -= 1
            finish = self.cache.commit
            if part.drafts:
                finish = self.cache.accept
                self._check_drafts(part)
            if part.samples:
                sequence.num_pending -= 1
                sequence.tokens.append(self.digests(sequence)[part.end - 1] >> 33 & 1)
            if sequence.lease is not None:
                sequence.num_committed = part.end
                finish(sequence.lease, ints(*sequence.tokens), part.end, step.step_id)
        return step

    def fail(self) -> list[Sequence]:
        """All launched steps fail; returns the requests that fail with them."""
        failed: dict[int, Sequence] = {}
        for step in self.steps:
            self._begin_copies(step, is_after_model=False)
            for part in step.parts:
                part.sequence.num_in_flight = part.sequence.num_pending = 0
                if part.sequence.lease is not None:
                    failed[id(part.sequence)] = part.sequence
        for sequence in failed.values():
            self.end(sequence, Ending.DROPPED)
        for step in reversed(self.steps):
            self.cache.fail_step(step.step_id)
        self.steps.clear()
        return list(failed.values())

    def end(self, sequence: Sequence, ending: Ending = Ending.FINISHED) -> None:
        self.cache.release(sequence.held, ending)
        sequence.lease = None

    def run(self, key: PrefixKey, tokens: list[int], *, max_output: int = 0) -> Sequence:
        """Compute a prompt, and some output, step by step; the lease stays open."""
        sequence = self.claim(key, tokens)
        if sequence.held.onboarding:
            assert self.cache.onboard(sequence.held) is None
            self.settle()
            assert sequence.held.is_ready
        wanted = len(tokens) + max_output
        while sequence.num_computed < wanted:
            step = self.plan(sequence)
            assert step.parts, "no room"
            self.commit()
            audit(self.cache)
        return sequence

    def serve(self, key: PrefixKey, tokens: list[int], *, max_output: int = 0) -> int:
        """Run a request to its end; returns how many of its tokens were found."""
        sequence = self.run(key, tokens, max_output=max_output)
        found = sequence.held.num_cached_tokens
        self.end(sequence)
        audit(self.cache)
        return found

    def found(self, key: PrefixKey, tokens: list[int]) -> int:
        """How many tokens a request could reuse now."""
        return self.cache.lookup(key, ints(*tokens)).num_pages * self.page_size

    # Copies

    def take_copies(self) -> list[Copy]:
        """Start the queued copies without a step."""
        assert not self.steps
        step = Step(StepId(0), copies=self.cache.take_copies())
        before = set(self.under_way)
        for is_after_model in (False, True):
            self._begin_copies(step, is_after_model=is_after_model)
        return [copy for copy_id, (copy, _) in self.under_way.items() if copy_id not in before]

    def acknowledge(
        self, copy: Copy, arrived: list[bool] | None = None, error: str | None = None
    ) -> None:
        """End a copy: whole, only where `arrived` says so, or not at all, with an error."""
        copy, contents = self.under_way.pop(copy.copy_id)
        good = [content != () for content in contents]
        if arrived is not None:
            good = [a and b for a, b in zip(good, arrived, strict=True)]
        if error is not None:
            good = [False] * len(good)
        for place, (content, is_good) in enumerate(zip(contents, good, strict=True)):
            if is_good:
                self._write_copy(copy, place, content)
            elif copy.target is not Tier.STORAGE:  # torn: the content is undefined
                self.memory.pop((copy.family, copy.target, int(copy.target_units[place])), None)
        self.cache.acknowledge(CopyDone(copy.copy_id, np.array(good, np.bool_), error))

    def settle_all_but(self, slow: Copy) -> None:
        """All copies but this one succeed; it stays in progress."""
        self.take_copies()
        for copy, _ in list(self.under_way.values()):
            if copy.copy_id != slow.copy_id:
                self.acknowledge(copy)

    def settle(self) -> None:
        """All copies succeed, and those that follow from them."""
        self.take_copies()
        while self.under_way:
            for copy, _ in list(self.under_way.values()):
                self.acknowledge(copy)
            self.take_copies()
        audit(self.cache)

    # Memories

    def digests(self, sequence: Sequence, drafts: list[int] | None = None) -> list[int]:
        return digests(sequence.key, sequence.tokens + (drafts or []), self.page_size)

    def read(self, plane: int, unit: int) -> Content:
        where = self.layout.planes[plane]
        return tuple(self.memory.get((where.family_index, where.tier, unit), ()))

    def _unit(self, family: int, unit: int) -> list[int | None]:
        width = 1 if self.layout.device[family].family.is_state else self.page_size
        return self.memory.setdefault((family, Tier.DEVICE, unit), [None] * width)

    def _write(self, part: Part) -> None:
        marks = self.digests(part.sequence, part.drafts)
        for plane in self.layout.device:
            table = part.tables[plane.index]
            if plane.family.is_state:
                self.memory[plane.index, Tier.DEVICE, table[0]] = [marks[part.end - 1]]
                continue
            for position in range(part.begin, part.end + len(part.drafts)):
                page, offset = divmod(position, self.page_size)
                self._unit(plane.index, table[page])[offset] = marks[position]

    def _check_state(self, part: Part) -> None:
        for plane in self.layout.device:
            if plane.family.is_state and part.begin:
                [state] = self._unit(plane.index, part.tables[plane.index][0])
                wanted = self.digests(part.sequence)[part.begin - 1]
                assert state == wanted, f"resumes at {part.begin} from another state"

    def _check_pages(self, part: Part) -> None:
        marks = self.digests(part.sequence, part.drafts)
        for plane in self.layout.device:
            if plane.family.is_state:
                continue
            seen = getattr(plane.family, "window", part.begin + 1) - 1
            for position in range(max(0, part.begin - seen), part.end + len(part.drafts)):
                page, offset = divmod(position, self.page_size)
                unit = part.tables[plane.index][page]
                assert unit != ABSENT, f"{plane.family.name}: position {position} is not held"
                assert self._unit(plane.index, unit)[offset] == marks[position], (
                    f"{plane.family.name}: unit {unit} does not hold position {position}"
                )

    def _begin_copies(self, step: Step, *, is_after_model: bool) -> None:
        for copy in step.copies:
            if copy.is_after_model != is_after_model:
                continue
            if copy.source is Tier.STORAGE:
                contents = [self.storage.get((copy.family, h), ()) for h in copy.hashes]
            else:
                contents = [
                    tuple(self.memory.get((copy.family, copy.source, unit), ()))
                    for unit in copy.source_units.tolist()
                ]
            if copy.source is not copy.target:
                self.under_way[copy.copy_id] = (copy, contents)
                continue
            for place, content in enumerate(contents):
                self._write_copy(copy, place, content)

    def _write_copy(self, copy: Copy, place: int, content: Content) -> None:
        if copy.target is Tier.STORAGE:
            self.storage[copy.family, copy.hashes[place]] = content
        else:
            unit = int(copy.target_units[place])
            self.memory[copy.family, copy.target, unit] = list(content)
