"""Adapter time slices: which adapters run, and which wait or are paused for others.

One entry for each adapter with unfinished requests. If all of them fit at once (`Residency.fits`),
each runs as soon as its weights are on the device. Otherwise the next entry displaces running ones
whose quantum is over. The base model always runs; its entry only counts its paused requests and its
time.

Takes the queue, the rows and the duration of loads. Gives the adapters whose requests may run,
pauses requests, and requests weights. Knows no page, and no policy by its name.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.outcomes import Readiness
from manyroots.lora.residency import Residency
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.request import Request
from manyroots.scheduler.rows import Rows

QUANTUM_STEPS = 16
"""The fewest steps that an entry runs. Short compared to what a reader of a stream notices."""
QUANTUM_LOADS = 4
"""It also runs for the duration of this many loads, if weights load while others run."""
QUANTUM_LOADS_ALONE = 20
"""The same if they cannot: each switch then leaves rows idle for one load."""
OVERDUE_STEPS = 128
"""A paused request without a token for this long comes before every other."""

HasRoom = Callable[[Request], bool]
"""Whether there are pages for a waiting request to start."""
Pause = Callable[[Request], None]
"""Takes a running request's row; its pages, tokens and progress stay."""


class EntryState(enum.Enum):
    """The state of an adapter's requests."""

    WAITING = "waiting"
    """None of its requests runs or is paused."""
    LOADING = "loading"
    """It may run; its weights are being loaded."""
    RUNNING = "running"
    """Its requests may have rows."""
    PAUSED = "paused"
    """Some of its requests have started, and others run in its place."""


class Entry:
    """One adapter with unfinished requests. Only `AdapterSlices` changes it."""

    __slots__ = (
        "adapter",
        "lacked_room",
        "num_blocks",
        "num_requests",
        "paused",
        "since",
        "started",
        "state",
    )

    def __init__(
        self, adapter: AdapterDigest | None, state: EntryState, num_blocks: int = 0
    ) -> None:
        self.adapter = adapter
        self.state = state
        self.num_blocks = num_blocks
        """The device blocks of its weights."""
        self.since = StepId(0)
        """When it entered its state; for a running entry, when its quantum started."""
        self.started = StepId(0)
        """When it last started to run."""
        self.lacked_room: StepId | None = None
        """When its next request last lacked pages; None if one has started since then."""
        self.num_requests = 0
        """Unfinished requests."""
        self.paused: dict[Request, None] = {}
        """In the order in which they were paused."""

    @property
    def paused_since(self) -> StepId:
        """When its longest-paused request was paused."""
        return next(iter(self.paused)).since


Claim = tuple[Entry, Request | None]
"""An entry that should run, and its newly arrived request; None: only for its paused ones."""


class AdapterSlices:
    """The table, and the rule by which entries change their states."""

    def __init__(
        self, adapters: Residency, rows: Rows, waiting: WaitingQueue, quantum_steps: int | None
    ) -> None:
        """`quantum_steps`: None to derive it from the duration of loads, at least QUANTUM_STEPS."""
        self.adapters = adapters
        self.max_loras = adapters.limits.max_loras
        self._waiting = waiting
        self.rows = rows
        self.importance = waiting.policy.importance
        self.base = Entry(None, EntryState.RUNNING)
        self.entries: dict[AdapterDigest, Entry] = {}
        self.active: dict[AdapterDigest, Entry] = {}
        """Entries that are loading or running: these must fit at once."""
        self.num_blocks = 0
        """Blocks of all entries."""
        self._num_active_blocks = 0
        self.paused: dict[Entry, None] = {}
        self.num_paused_requests = 0
        self.total_pauses = 0
        """Number of pauses of requests."""
        self.num_displaced: Counter[AdapterDigest] = Counter()
        """How often each adapter's requests were paused together."""
        self._fixed_quantum_steps = quantum_steps
        self.min_quantum_steps = quantum_steps or QUANTUM_STEPS
        """The quantum of rows, which need no load."""
        self.step_id = StepId(0)
        """The last step in which a request waited or was paused."""
        self._claims: list[Claim] = []
        """Claims of this step, in order."""
        self.without_row: dict[AdapterDigest | None, Entry] = {}
        """Entries whose first request starts before any other does, in order."""
        self._granted: set[Request] = set()
        """Paused requests for which there is a row in this step."""
        self._num_kept_rows = 0

    # What time a slice has

    @property
    def quantum_steps(self) -> int:
        """Steps for which no other entry displaces a running one."""
        if self._fixed_quantum_steps is not None:
            return self._fixed_quantum_steps
        loads = QUANTUM_LOADS if self.adapters.loads_ahead else QUANTUM_LOADS_ALONE
        return max(QUANTUM_STEPS, loads * self.adapters.host_load_steps)

    def is_overdue(self, since: StepId) -> bool:
        """Whether a request that was paused then comes before every other."""
        return self.step_id - since >= OVERDUE_STEPS

    # Requests come, pause, resume and go

    def arrive(self, adapter: AdapterDigest) -> None:
        """A request of an adapter was submitted."""
        entry = self.entries.get(adapter)
        if entry is None:
            num_blocks = self.adapters.num_blocks(adapter)
            entry = self.entries[adapter] = Entry(adapter, EntryState.WAITING, num_blocks)
            self.num_blocks += num_blocks
        entry.num_requests += 1

    def leave(self, adapter: AdapterDigest) -> None:
        """A request of an adapter is finished, and no launched step computes it."""
        entry = self.entries[adapter]
        entry.num_requests -= 1
        if not entry.num_requests:
            self._move(entry, EntryState.WAITING)
            del self.entries[adapter]
            self.num_blocks -= entry.num_blocks

    def seated(self, adapter: AdapterDigest) -> None:
        """A request of an adapter is about to run."""
        entry = self.entries[adapter]
        entry.lacked_room = None
        if entry.state is not EntryState.RUNNING:
            self._move(entry, EntryState.RUNNING)

    def drop(self, request: Request) -> None:
        """A paused request resumes, or is finished, or was preempted."""
        entry = self.entry_of(request)
        del entry.paused[request]
        self.num_paused_requests -= 1
        if not entry.paused and entry.state is EntryState.PAUSED:
            self._move(entry, EntryState.WAITING)

    def entry_of(self, request: Request) -> Entry:
        adapter = request.group[0]
        return self.base if adapter is None else self.entries[adapter]

    def paused_requests(self) -> list[Request]:
        """All of them."""
        entries = (self.base, *self.active.values(), *self.paused)
        return [request for entry in entries for request in entry.paused]

    def paused_requests_of(self, adapter: AdapterDigest) -> list[Request]:
        entry = self.entries.get(adapter)
        return [] if entry is None else list(entry.paused)

    def _pause(self, request: Request, pause: Pause) -> None:
        pause(request)
        request.since = self.step_id
        self.entry_of(request).paused[request] = None
        self.num_paused_requests += 1
        self.total_pauses += 1

    def _move(self, entry: Entry, state: EntryState) -> None:
        """The only method that changes an entry's state."""
        assert entry.adapter is not None
        if self.active.pop(entry.adapter, None) is not None:
            self._num_active_blocks -= entry.num_blocks
        self.paused.pop(entry, None)
        if state is EntryState.PAUSED:
            self.paused[entry] = None
        elif state is not EntryState.WAITING:
            self.active[entry.adapter] = entry
            self._num_active_blocks += entry.num_blocks
        if state is EntryState.RUNNING:
            entry.started = self.step_id
        entry.state = state
        entry.since = self.step_id

    # Which requests may begin

    def is_open(self, adapter: AdapterDigest | None) -> bool:
        """Whether requests of an adapter may run now."""
        if adapter is None:
            return True
        if self.adapters.readiness(adapter) is not Readiness.READY:
            return False
        return adapter in self.active or self._fits_too(adapter)

    @property
    def _is_crowded(self) -> bool:
        """Whether not all entries can run at once."""
        return not self.adapters.fits(self.entries, self.num_blocks)

    def _fits_too(self, adapter: AdapterDigest) -> bool:
        num_blocks = self._num_active_blocks + self.entries[adapter].num_blocks
        return self._fit([*self.active, adapter], num_blocks)

    def _fit(self, adapters: Collection[AdapterDigest], num_blocks: int) -> bool:
        """Whether these entries can run at once, with room to load ahead if not all entries can."""
        return self.adapters.fits(adapters, num_blocks, leaves_spare=self._is_crowded)

    def open_lanes(self) -> dict[AdapterDigest | None, None]:
        """Adapters with waiting requests that may run now."""
        lanes, resident = self._waiting.lanes, self.adapters.slots.by_owner
        is_open: dict[AdapterDigest | None, None] = {None: None} if None in lanes else {}
        if len(lanes) > len(is_open):
            # There may be many more wanted adapters than resident ones, or many fewer.
            few = lanes if len(lanes) < len(resident) else resident
            is_open |= dict.fromkeys(d for d in few if d in lanes and self.is_open(d))
        return is_open

    @property
    def keeps_rows(self) -> bool:
        """Whether a new request may have to leave rows free."""
        return bool(self._num_kept_rows or self.without_row)

    def num_kept_rows(self, adapter: AdapterDigest | None) -> int:
        """Free rows that a new request must leave: those of entries paused a moment ago, which
        entries in their first quantum may use, and those of entries without a row."""
        if not (self._num_kept_rows or self.without_row) or adapter in self.without_row:
            return 0
        entry = self.base if adapter is None else self.entries[adapter]
        is_new = entry.state is EntryState.RUNNING and self._age(entry) < self.min_quantum_steps
        return len(self.without_row) + (0 if is_new else self._num_kept_rows)

    def returning(self) -> Iterator[Request]:
        """Paused requests that may run now, while there are rows for them: first those that were
        granted one."""
        found = [
            (request not in self._granted, request.since, request.serial, request)
            for entry in (self.base, *self.active.values())
            if entry.paused and self.is_open(entry.adapter)
            for request in entry.paused
        ]
        for is_plain, _, _, request in sorted(found):
            if len(self.rows.free) > (len(self.without_row) if is_plain else 0):
                yield request

    def give_up(self, adapter: AdapterDigest) -> None:
        """An entry's next request lacks pages: if it has no row, another may run in this step."""
        self.entries[adapter].lacked_room = self.step_id
        if adapter in self.active and not self.adapters.num_seats(adapter):
            self._yield(self.active[adapter])

    # The rule

    def begin_step(
        self, step_id: StepId, loaded: Collection[Request], has_room: HasRoom, pause: Pause
    ) -> None:
        """Choose the entries that run. `loaded`: requests that already have their pages and wait in
        no lane."""
        self.step_id = step_id
        self._claims = []
        if self.paused or (self.entries and self._is_crowded):
            self._free_unwanted(loaded, has_room)
            self._claims = self._in_order(loaded)
            self._choose(has_room, pause)
        self.without_row = {}
        self._granted = set()
        self._num_kept_rows = 0
        if self.entries or self.base.paused:
            self._take_rows(loaded, has_room, pause)
            self._num_kept_rows = self._count_kept_rows()

    def _free_unwanted(self, loaded: Collection[Request], has_room: HasRoom) -> None:
        """Entries whose weights have arrived start to run. Entries yield if they have no row and no
        request that could start now."""
        wanted = {request.group[0] for request in loaded}
        for entry in list(self.active.values()):
            assert entry.adapter is not None
            if entry.state is EntryState.LOADING:
                if not self.adapters.is_resident(entry.adapter):
                    continue
                self._move(entry, EntryState.RUNNING)
            if entry.paused or entry.adapter in wanted or self._num_rows(entry):
                continue
            lane = self._waiting.lanes.get(entry.adapter)
            if lane is None or not has_room(lane.head):
                self._yield(entry)

    def _in_order(self, loaded: Collection[Request]) -> list[Claim]:
        """Overdue entries; waiting ones in the policy's order, and paused ones with a new request;
        then the entry that has been paused longest."""
        paused = sorted(self.paused, key=lambda entry: (entry.paused_since, entry.adapter))
        heads: dict[Entry, Request | None] = {
            entry: None for entry in paused if self.is_overdue(entry.paused_since)
        }
        count = len(self.active) + len(self.paused) + 2
        adapters = self._waiting.next_adapters(count, self.adapters.slots.by_owner)
        firsts = [*loaded, *(self._waiting.lanes[adapter].head for adapter in adapters)]
        firsts.sort(key=self._is_patient)
        for request in firsts:
            adapter = request.group[0]
            if adapter is None or adapter in self.active:
                continue
            entry = self.entries[adapter]
            if entry.state is EntryState.WAITING or request.since > entry.started:
                heads.setdefault(entry, request)
        heads |= {entry: heads.get(entry) for entry in paused}
        order = list(heads.items())
        if self.importance is not None:
            order.sort(key=lambda claim: self._importance(*claim))
        return order

    def _choose(self, has_room: HasRoom, pause: Pause) -> None:
        """Entries run if they fit beside the others; then the next one displaces some."""
        for entry, head in self._claims:
            assert entry.adapter is not None
            fits = self._fits_too(entry.adapter)
            if not fits and head is not None and self._is_patient(head):
                continue
            victims = [] if fits else self._victims_for(entry, head)
            if head is not None and victims is not None and not has_room(head):
                entry.lacked_room = self.step_id
                if not entry.paused:
                    continue
                head = None  # It may still run for its paused requests.
                victims = [] if fits else self._victims_for(entry, head)
            is_resident = self.adapters.is_resident(entry.adapter)
            comes_ahead = not is_resident and self.adapters.comes_ahead(entry.adapter)
            if victims is None or (victims and comes_ahead):
                if self._is_urgent(entry, head):
                    return  # Nothing overtakes the next entry.
                continue
            for victim in victims:
                self._displace(victim, pause)
            self._move(entry, EntryState.RUNNING if is_resident else EntryState.LOADING)

    def _is_urgent(self, entry: Entry, head: Request | None) -> bool:
        """Whether an entry displaces others at once: for a new request, or if it is overdue."""
        return head is not None or self.is_overdue(entry.paused_since)

    def _victims_for(self, entry: Entry, head: Request | None) -> list[Entry] | None:
        """Entries whose pause makes another one fit: those with the fewest rows, once the quantum
        of each is over. None if it must wait, or may not displace them."""
        order = sorted(self.active.values(), key=lambda e: (self._num_rows(e), e.since))
        if self.importance is not None:
            own = self._importance(entry, head)
            order = [e for e in order if self._importance(e, None) >= own]
            order.sort(key=lambda e: -self._importance(e, None))
        left, num_rows, quantum_steps = dict(self.active), 0, self.quantum_steps
        num_blocks = self._num_active_blocks + entry.num_blocks
        for count, victim in enumerate(order, 1):
            is_young = self._age(victim) < quantum_steps
            if is_young or victim.state is not EntryState.RUNNING:
                return None
            assert victim.adapter is not None
            assert entry.adapter is not None
            del left[victim.adapter]
            num_rows += self._num_rows(victim)
            num_blocks -= victim.num_blocks
            if self._fit([*left, entry.adapter], num_blocks):
                may_displace = self._is_urgent(entry, head) or len(entry.paused) >= num_rows
                return order[:count] if may_displace else None
        return None

    def _displace(self, entry: Entry, pause: Pause) -> None:
        for request in [r for r in self.rows.running if r.group[0] == entry.adapter]:
            self._pause(request, pause)
        assert entry.adapter is not None
        self.num_displaced[entry.adapter] += 1
        self._yield(entry)

    def _yield(self, entry: Entry) -> None:
        self._move(entry, EntryState.PAUSED if entry.paused else EntryState.WAITING)

    # Rows

    def _take_rows(self, loaded: Collection[Request], has_room: HasRoom, pause: Pause) -> None:
        """Entries without a row take one from the entry with the most rows, and so do overdue
        requests."""
        rows = self.rows
        if len(rows.free) >= len(self._waiting) + len(loaded) + self.num_paused_requests:
            return
        wanted: list[Request] = []
        firsts: list[Request] = []
        for entry in (self.base, *self.active.values()):
            if entry.paused and self.is_open(entry.adapter):
                wanted += [r for r in entry.paused if self.is_overdue(r.since)]
                first = next(iter(entry.paused))
                if not self._num_rows(entry) and not self.is_overdue(first.since):
                    firsts.append(first)
        if len(rows.free) <= len(wanted):  # otherwise rows are left, and the policy's order decides
            wanted += [r for r in self._newcomers(loaded) if has_room(r)]
        num_rows: Counter[AdapterDigest | None] | None = None
        for index, request in enumerate((*wanted, *firsts)):
            entry = self.entry_of(request)
            if index >= len(rows.free):
                if num_rows is None:
                    num_rows = Counter(each.group[0] for each in rows.running)
                lender = self._lender(request, num_rows)
                if lender is None:
                    continue
                num_rows[lender.group[0]] -= 1
                self._pause(lender, pause)
                if lender.group[0] is not None and not num_rows[lender.group[0]]:
                    self._yield(self.entry_of(lender))
                if not num_rows[entry.adapter]:
                    entry.since = self.step_id
            if request in entry.paused:
                self._granted.add(request)
            else:
                self.without_row[entry.adapter] = entry

    def _newcomers(self, loaded: Collection[Request]) -> Iterator[Request]:
        """The first requests of entries that may run and have neither a row nor a paused
        request."""
        waiting = self._waiting
        adapters = [adapter for adapter in self.open_lanes() if adapter is not None]
        firsts = [key[2] for key in sorted(waiting.keys_of(adapters))]
        firsts += [request for request in loaded if self.is_open(request.group[0])]
        head = waiting.head
        if self.importance is not None and head is not None:
            most = self.importance(head)
            firsts = [request for request in firsts if self.importance(request) <= most]
        for request in firsts:
            entry = self.entry_of(request)
            has_begun = entry.paused or self._num_rows(entry)
            num_steps = self.step_id - request.since
            if not has_begun and num_steps >= waiting.policy.row_patience_steps:
                yield request

    def _lender(self, request: Request, num_rows: Counter[AdapterDigest | None]) -> Request | None:
        """From the entry with the most rows: the request that has run longest, and for at least a
        quantum. A request whose prompt is not computed yet comes last."""
        latest = self.step_id - self.min_quantum_steps
        old = [r for r in self.rows.running if r.since <= latest]
        for adapter, _ in num_rows.most_common():
            running = [r for r in old if r.group[0] == adapter]
            if self.importance is not None:
                own = self.importance(request)
                running = [r for r in running if self.importance(r) >= own]
            if running:
                return min(running, key=lambda r: (r in self.rows.prompts, r.since, r.tenancy))
        return None

    def _count_kept_rows(self) -> int:
        """Rows stay free for entries that were paused a moment ago, so a short request of another
        adapter costs them only a short pause. Not if requests differ in importance."""
        if self.importance is not None or not self.rows.running:
            return 0
        brief = (e for e in self.paused if self._age(e) < self.min_quantum_steps)
        num_rows = sum(len(entry.paused) for entry in brief)
        new = (e for e in self.active.values() if self._age(e) < self.min_quantum_steps)
        return num_rows and max(num_rows - sum(map(self._num_rows, new)), 0)

    # Weights

    def prepare(self, loaded: Collection[Request], without_room: set[AdapterDigest | None]) -> None:
        """Load weights to the device: for entries that may run, then for the next ones, last for
        those that lacked pages. As many as there are slots; later ones are loaded to the host."""
        lanes, adapters = self._waiting.lanes, self.adapters
        claims, self._claims = self._claims, []
        if not (self.active or self.paused or loaded or len(lanes) > (None in lanes)):
            return
        most = adapters.num_obtainable
        most = len(lanes) if most is None else most
        wanted: list[AdapterDigest | None] = [*self.active]
        wanted += [entry.adapter for entry, _ in claims]
        wanted += [request.group[0] for request in loaded]
        count = len(self.active) + most + len(without_room) + 1
        wanted += self._waiting.next_adapters(count, adapters.slots.by_owner)
        unseated = [d for d in dict.fromkeys(wanted) if d and not adapters.num_seats(d)]
        unseated.sort(key=self._lacked_room)
        most = adapters.num_obtaining(unseated)
        # Not later ones that have a slot: the slot is available to others.
        beyond = [d for d in unseated[most:] if adapters.slots.find(d) is None]
        if unseated:
            adapters.prepare([*unseated[:most], *beyond][: self.max_loras or None])

    # What is asked often

    def _age(self, entry: Entry) -> int:
        return self.step_id - entry.since

    def _lacked_room(self, adapter: AdapterDigest) -> bool:
        """Whether an entry that may not run lacked pages a moment ago. A step looks at some entries
        only. If the others counted as having room, they would replace each other's weights."""
        entry = self.entries[adapter]
        if entry.lacked_room is None or adapter in self.active:
            return False
        return self.step_id - entry.lacked_room < QUANTUM_STEPS

    def _is_patient(self, request: Request) -> bool:
        """Whether a waiting request displaces no other adapter yet."""
        return self.step_id - request.since < self._waiting.policy.patience_steps

    def _num_rows(self, entry: Entry) -> int:
        """Rows of an entry; for the base model, whether it has any."""
        if entry.adapter is not None:
            return self.adapters.num_seats(entry.adapter)
        return int(any(request.group[0] is None for request in self.rows.running))

    def _importance(self, entry: Entry, head: Request | None) -> int:
        """The importance of its most important started request, or of `head`."""
        assert self.importance is not None
        begun = [r for r in self.rows.running if r.group[0] == entry.adapter]
        requests = [*begun, *entry.paused, *([] if head is None else [head])]
        return min(map(self.importance, requests), default=0)
