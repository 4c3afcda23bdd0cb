"""The facade: the scheduler's only view of the prefix cache.

In: keys, tokens and the number of tokens that a step will compute. Out: leases that hold units, and
copy intents for the plan. A page becomes findable when the step that fills it is planned, if the
family allows reading it within that step. It becomes reliable when the step commits; a failed step
removes its pages. Deterministic: the same calls give the same units and victims.

Order within a step (C01): claim every request that may begin, then onboard and extend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from manyroots.cache.checkpoints import least_saved
from manyroots.cache.costs import Costs
from manyroots.cache.events import CacheEvent
from manyroots.cache.eviction import Allocator, Evictor
from manyroots.cache.fork_share import ForkShare
from manyroots.cache.growth import Growth
from manyroots.cache.holding import NO_WALK, Holder
from manyroots.cache.index import Index
from manyroots.cache.inspection import TreeWalk, plane_views
from manyroots.cache.keeping import Keep, Keeper
from manyroots.cache.keys import ENDLESS, PageHasher, PrefixKey
from manyroots.cache.lease import Checkpoint, Lease
from manyroots.cache.loans import Loans
from manyroots.cache.matching import Limit, Match
from manyroots.cache.next_turns import NextTurns
from manyroots.cache.onboarding import Onboarding
from manyroots.cache.outcomes import (
    CacheStats,
    Ending,
    Evicted,
    Extension,
    PlaneStats,
    Refusal,
)
from manyroots.cache.planes import CacheLayout, Units
from manyroots.cache.policies import CachePolicies, Eviction
from manyroots.cache.prefetch import Prefetcher, Share, Ticket
from manyroots.cache.publishing import Publisher, nearest_attached
from manyroots.cache.retention import Marks
from manyroots.cache.sole import SoleGrowth, SoleHolder, SolePublisher
from manyroots.cache.states import States
from manyroots.cache.storage_health import StorageHealth
from manyroots.cache.transfers import UnitTransfers
from manyroots.cache.tree import TOKEN_BYTES, Node
from manyroots.cache.writeback import WriteBacker
from manyroots.ids import AdapterDigest, Namespace, StepId, Tier
from manyroots.messages import Retention
from manyroots.snapshot import PlaneView
from manyroots.step import Copy, CopyDone, Int32s, KeepStored

MOST_OVERLAP_S = 0.1
"""A request starts before its pages have arrived only if they arrive within this time."""


class Kinds(NamedTuple):
    """The classes that a cache is made of."""

    publisher: type[Publisher]
    growth: type[Growth]
    holder: type[Holder]


ANY = Kinds(Publisher, Growth, Holder)
"""For any families and tiers."""
SOLE = Kinds(SolePublisher, SoleGrowth, SoleHolder)
"""For one family that keeps every page, on the device only."""


class ReuseCounts:
    """What started requests looked up since the start, in tokens."""

    __slots__ = ("missed_tokens", "num_hit_tokens", "num_host_hit_tokens", "num_lookup_tokens")

    def __init__(self) -> None:
        self.num_lookup_tokens = self.num_hit_tokens = self.num_host_hit_tokens = 0
        self.missed_tokens: Counter[Limit] = Counter()
        """By the reason that they were not found."""


class PrefixCache:
    """Units for running requests, and the index of what can be reused.

    With over 30 attributes Python 3.11 finds its methods slowly, and planning calls many.
    """

    def __init__(self, layout: CacheLayout, policies: CachePolicies) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self._policies = policies
        hasher = None
        if policies.records_events or policies.uses_storage:
            hasher = PageHasher(policies.identity, layout.page_size * TOKEN_BYTES)
        self._hasher = hasher
        self.index = Index(layout, hasher, records_events=policies.records_events)
        learns = policies.eviction is Eviction.FORKS
        self.forks = ForkShare(layout.device[0].num_units) if learns else None
        self.next_turns = NextTurns()
        self.evictors = [
            Evictor(self.index, plane, self.forks, self.next_turns) for plane in layout.planes
        ]
        self.storage = StorageHealth()
        self.marks = Marks(
            layout,
            self.index.tree,
            self.evictors,
            self.storage if policies.uses_storage and layout.host else None,
        )
        self.transfers = UnitTransfers(self.index)
        kinds = SOLE if layout.is_sole else ANY
        self.publisher = kinds.publisher(
            self.index, self.evictors, self.forks, reuse=policies.reuse
        )
        self.index.on_loosened = self.publisher.offer
        self.costs = Costs(policies.load_costs, _most_units(layout))
        self._writer = WriteBacker(
            self.index, self.evictors, self.transfers, self.publisher, policies, self.storage,
            self.marks,
        )  # fmt: skip
        self._allocator = Allocator(self.index, self.evictors)
        self._states = States(
            self.index, self._allocator, self.transfers, self.publisher, reuse=policies.reuse
        )
        self._growth = kinds.growth(self.index, self._allocator, self._states, self.publisher)
        self._holder = kinds.holder(self.index, self.costs, reuse=policies.reuse)
        self.keeper = Keeper(self.index, self._holder, self.publisher)
        self.prefetcher = Prefetcher(
            self.index, self.evictors, self.publisher, self.keeper, hasher, self.transfers.next_id
        )
        self._onboarding = Onboarding(self.index, self._allocator, self.transfers, self._states)
        self.loans = Loans(self.index, self.evictors, self.costs)
        self.open_leases: dict[int, Lease] = {}
        self._is_sole = layout.is_sole
        self._learns_turns = any(plane.family.reach is not None for plane in layout.device)
        self._next_serial = 1
        self._reuse = ReuseCounts()
        self.left_storage_alone = False
        """Whether the last `prefetch` did not ask storage, although storage may have something."""

    # Finding

    def lookup(self, key: PrefixKey, tokens: Int32s) -> Match:
        """What a request could reuse now. Changes nothing.

        At least one token always remains to be computed: the request needs its logits.
        """
        nodes, depth, _, limit = self._holder.walk(key, tokens)
        return self._holder.match(nodes, depth, limit)

    def claim(
        self,
        key: PrefixKey,
        tokens: Int32s,
        num_prompt_tokens: int,
        may_reuse: bool,
        retention: Retention | None = None,
    ) -> Lease:
        """Hold what is found, on any tier. Always succeeds; release it if it is not needed.
        `retention`: the part of the prompt to keep when the lease ends."""
        nodes, depth, ahead, limit = self._holder.walk(key, tokens) if may_reuse else NO_WALK
        serial = self._next_serial
        self._next_serial = serial + 1
        cursor = nodes[-1] if nodes else self.index.tree.root
        lease = self.open_leases[serial] = Lease(key, cursor, len(self.layout.device), serial)
        lease.limit, lease.junction, lease.ahead = limit, depth, ahead
        lease.num_prompt_tokens, lease.retention = num_prompt_tokens, retention
        if depth == 0:
            return lease
        depth = self._holder.hold(lease, nodes, depth, tokens)
        if depth:
            lease.num_published_pages = depth
            lease.num_cached_tokens = depth * self.page_size
            forks = self.forks
            if forks is not None and cursor.last_used < forks.horizon and not cursor.children:
                forks.found(depth - cursor.first)
            self.publisher.touch(cursor, depth)
        return lease

    def begin(self, lease: Lease, num_tokens: int, is_first: bool = True) -> None:
        """The request of this lease starts. Its reuse counts once (C04), and not again when it
        resumes after a retraction. Without reuse there is nothing to count.

        Only now is the prefix that it found worth a copy. A waiting request claims repeatedly, and
        copies for each claim would fill the pool.
        """
        num_cached = lease.num_cached_tokens
        if num_cached:
            cursor = lease.cursor if lease.cursor.is_attached else nearest_attached(lease.cursor)
            if self.layout.host:
                self._writer.reused(lease.serial, cursor)
            if is_first:
                cursor.num_hits += 1
                if lease.ahead is None:
                    self.publisher.asked_again(lease)
        if not is_first or not self._policies.reuse:
            return
        if self._learns_turns and lease.junction:
            self.next_turns.parted(nearest_attached(lease.cursor), lease.junction)
        counts = self._reuse
        counts.num_lookup_tokens += num_tokens
        counts.num_hit_tokens += num_cached
        counts.num_host_hit_tokens += lease.num_host_tokens
        num_missed = (num_tokens - 1) // self.page_size * self.page_size - num_cached
        if num_missed > 0:
            counts.missed_tokens[lease.limit] += num_missed
        if self.layout.host and lease.limit is Limit.TIER:
            self.costs.declined(Tier.HOST)

    @property
    def least_shared_pages(self) -> int:
        """Pages that a state must save to be worth waiting for. 0 if no layer has a state or
        nothing is reused: requests then share within a step, or not at all."""
        if not self._policies.reuse:
            return 0
        return least_saved(plane.family for plane in self.layout.device)

    def could_find_more(self, lease: Lease) -> bool:
        """Whether pages after those that the lease found were published since it was claimed."""
        if lease.ahead is None:
            return False
        depth, node = lease.num_published_pages, lease.cursor
        if node.end == depth and node.is_attached:
            return lease.ahead in node.children
        node = nearest_attached(node)
        while node.parent is not None and node.first >= depth:
            node = node.parent
        return node.end == depth and lease.ahead in node.children

    # Holding

    def may_overlap(self, lease: Lease) -> bool:
        """Whether a single request may start while what it found on the host arrives (T10). The
        next request waits for it, so it must not take long."""
        if not self._policies.overlaps_loads or not self._onboarding.may_overlap(lease):
            return False
        num_pages = len({page for _, page, _ in lease.onboarding})
        return self.costs.load_s(num_pages) <= MOST_OVERLAP_S

    def onboard(self, lease: Lease, *, overlaps: bool = False) -> Refusal | None:
        """Start loading what was found on the host. The lease is ready when it has arrived or, with
        `overlaps`, at once for the step being planned."""
        return self._onboarding.onboard(lease, overlaps=overlaps)

    def clip(self, lease: Lease, num_computed: int, num_tokens: int) -> int:
        """How many of `num_tokens` to compute so that the step ends where a state must be saved."""
        return self._growth.clip(lease, num_computed, num_tokens)

    def save_at(self, lease: Lease, num_pages: int) -> None:
        """Other requests wait for the state after this many pages of a lease: a step ends there and
        saves it."""
        lease.shared = num_pages

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether there is room for a new request of so many tokens, whatever it finds. Looks
        nothing up; if not, there may still be room for one that finds much of its prefix."""
        return self._growth.has_room_for(num_tokens)

    def can_reach(
        self, lease: Lease, num_computed: int, num_tokens: int, num_step_tokens: int
    ) -> bool:
        """Whether there is room to continue to `num_tokens`, in steps of at most `num_step_tokens`,
        if no other lease takes any."""
        return self._growth.can_reach(lease, num_computed, num_tokens, num_step_tokens)

    def extend(
        self,
        lease: Lease,
        num_computed: int,
        num_tokens: int,
        step_id: StepId,
        most_tokens: int = 0,
    ) -> Extension | Refusal:
        """Units for a step that extends the lease from `num_computed` to `num_tokens` tokens.
        `most_tokens`: up to here, the page of the next token may be included if one is free."""
        return self._growth.extend(lease, num_computed, num_tokens, step_id, most_tokens)

    def draft(
        self, lease: Lease, num_computed: int, num_sure: int, num_tokens: int, step_id: StepId
    ) -> Extension | Refusal:
        """Like `extend`, but tokens from `num_sure` on are guesses that the step checks (P11). Call
        `accept` afterwards."""
        num_leases = len(self.open_leases)
        return self._growth.draft(lease, num_computed, num_sure, num_tokens, step_id, num_leases)

    @property
    def has_states(self) -> bool:
        """Whether a family of layers keeps only the newest state of a sequence."""
        return any(plane.family.is_state for plane in self.layout.device)

    def most_drafts(self, num_sure: int) -> int:
        """How many guesses may follow this many sure tokens."""
        return self._growth.most_drafts(num_sure)

    def next_pages(self, leases: list[Lease]) -> list[Units] | None:
        """One more page for each lease, all of which are full: by family, the unit that each got.
        None if they must be extended one by one."""
        return self._growth.next_pages(leases)

    def prefer_own(self, lease: Lease) -> bool:
        """Give back other requests' copies of pages that the lease has computed itself. A single
        request that needs all memory must hold each page once.

        False if it holds none, or if another lease holds anything.
        """
        if len(self.open_leases) > 1 or self.has_transfers:
            return False
        return self.publisher.prefer_own(lease)

    def num_resumable_tokens(self, lease: Lease, tokens: Int32s) -> int:
        """How many of a lease's tokens would be found if it were released and claimed again now."""
        return self._holder.num_resumable_tokens(lease, tokens)

    # Publishing

    def announce(self, lease: Lease, tokens: Int32s, num_tokens: int, step_id: StepId) -> None:
        """Step `step_id`, being planned, will have computed the first `num_tokens` of `tokens`.
        Publish the pages that are full then, for families that share within a step."""
        self.publisher.announce(lease, tokens, num_tokens, step_id)

    def commit_step(self, step_id: StepId) -> None:
        """The step succeeded: what was announced for it is reliable now."""
        announced = self.publisher.commit_step(step_id)
        if not self.layout.host:
            return
        self.storage.pass_to(step_id)
        for serial, nodes in announced:
            self._writer.published(serial, nodes)
        if self._allocator.has_allocated:
            # Only then: an idle cache must stop copying, however small its host tier is.
            self._allocator.has_allocated = False
            self._writer.keep_ahead()

    def commit(self, lease: Lease, tokens: Int32s, num_tokens: int, step_id: StepId) -> None:
        """Step `step_id` has computed the first `num_tokens` of `tokens`: publish the full
        pages."""
        num_full = min(num_tokens, len(tokens)) // self.page_size
        if not self._policies.reuse or (
            num_full <= lease.num_published_pages and not lease.checkpoints
        ):
            return
        nodes = self.publisher.publish(lease, tokens, num_full, step_id, True)
        if lease.checkpoints:
            nodes += self._publish_checkpoints(lease, step_id)
        if nodes:
            self._writer.published(lease.serial, nodes)

    def accept(self, lease: Lease, tokens: Int32s, num_tokens: int, step_id: StepId) -> None:
        """Of the drafts that step `step_id` computed, the first `num_tokens` of `tokens` are right.
        Publish the full pages, and free the pages after them. The lease continues from there with
        any tokens."""
        self._growth.rewind(lease, num_tokens)
        self.commit(lease, tokens, num_tokens, step_id)

    def _publish_checkpoints(self, lease: Lease, step_id: StepId) -> list[Node]:
        """States of the prompt that a finished step saved become findable."""
        nodes: list[Node] = []
        kept: list[Checkpoint] = []
        for saved in lease.checkpoints:
            is_prompt = saved.boundary * self.page_size <= lease.num_prompt_tokens
            if saved.step_id > step_id or not is_prompt:
                kept.append(saved)
                continue
            node = self.publisher.publish_checkpoint(lease, saved)
            if node is not None:
                nodes.append(node)
        lease.checkpoints = tuple(kept)
        return nodes

    def fail_step(self, step_id: StepId) -> None:
        """The step failed: pages announced for it are no longer findable."""
        self.publisher.fail_step(step_id)

    def release(self, lease: Lease, ending: Ending) -> None:
        """Free everything. Published pages stay findable until their memory is needed."""
        if not lease.is_open:
            raise RuntimeError("a lease was released twice")
        lease.is_open = False
        del self.open_leases[lease.serial]
        if lease.checkpoints:
            self._end_checkpoints(lease, ending)
        is_served = ending is not Ending.DROPPED  # a waiting request claims again at every step
        if lease.retention is not None and is_served and self._policies.reuse:
            self.marks.keep(lease, lease.retention)
        self._holder.give_back(lease)
        for plane_index, duplicates in lease.duplicates:
            self.index.pools[plane_index].drop(duplicates)
        cursor = lease.cursor if lease.cursor.is_attached else nearest_attached(lease.cursor)
        self.publisher.touch(cursor, cursor.end)
        self.publisher.offer_path(cursor)

    def _end_checkpoints(self, lease: Lease, ending: Ending) -> None:
        """Handle the states that the lease has saved: keep them for the next turn, or free them."""
        self._states.forget(lease)
        has_newer: set[int] = set()
        for checkpoint in reversed(lease.checkpoints):
            is_saved = checkpoint.step_id <= self.publisher.committed_step
            is_passed = checkpoint.family in has_newer and self._states.is_of_output(
                lease, checkpoint
            )
            is_worth = ending is Ending.LEFT or (ending is Ending.FINISHED and not is_passed)
            if is_worth and is_saved and self._policies.reuse:
                has_newer.add(checkpoint.family)
                node = self.publisher.publish_checkpoint(lease, checkpoint)
                if node is not None:
                    self._writer.published(lease.serial, [node])
            else:
                if ending is Ending.DROPPED:
                    self.publisher.withdraw_checkpoint(lease, checkpoint)
                self._holder.drop(checkpoint.family, checkpoint.unit)
        lease.checkpoints = ()

    def pass_time(self, now_s: float) -> None:
        """End the marks that have expired (T13)."""
        self.marks.pass_time(now_s)

    # Tiers

    def prefetch(self, key: PrefixKey, tokens: Int32s, room: Share = Share.ANY) -> Ticket | None:
        """Ask storage for pages that neither device nor host has; None if there are none, or no
        room for an answer. With less than `Share.ANY` the ticket may give the reason that storage
        was not asked. Pages that another ticket already asks for are not requested twice: this
        ticket waits for that answer (T09)."""
        if not self._policies.uses_storage or not self.layout.host:
            return None
        self.left_storage_alone = not self.storage.may_read
        if self.left_storage_alone:
            return None
        walk = self.lookup(key, tokens).walk
        num_pages = (len(tokens) - 1) // self.page_size - walk.depth
        if num_pages <= 0:
            return None
        if not self.costs.is_worth_fetching(num_pages, num_pages * self.page_size):
            self.costs.declined(Tier.STORAGE)
            self.left_storage_alone = True
            return None
        return self.prefetcher.ask(key, tokens, walk, room)

    def keep(self, key: PrefixKey, tokens: Int32s) -> Keep:
        """Keep the host's pages for a waiting request until `let_go` (T04)."""
        return self.keeper.keep(key, tokens)

    def let_go(self, keep: Keep) -> None:
        """The request starts or ends: what was kept for it stays until its memory is needed."""
        self.keeper.let_go(keep)

    @property
    def num_keeps(self) -> int:
        """Keeps that are still held; for audits."""
        return len(self.keeper.open)

    @property
    def host_room(self) -> list[tuple[int, int]]:
        """The state that decides whether keeps and storage requests are refused: equal states give
        equal answers."""
        return [self.prefetcher.room(plane) for plane in self.layout.host]

    @property
    def patience_steps(self) -> int | None:
        """For how many steps a request waits for storage; None: without a limit."""
        return self._policies.patience_steps

    def acknowledge(self, done: CopyDone) -> None:
        """A copy between tiers has ended."""
        family = self.prefetcher.acknowledge(done)
        if family is not None:
            self.storage.was_read(done)
            self._measure(Tier.STORAGE, family, done)
            return
        for move, answer in self.transfers.acknowledge(done):
            if move.source.tier is Tier.HOST and move.target is not None:
                self._measure(Tier.HOST, move.source.family_index, answer)
            if move.target is None:
                self.storage.was_written(answer)
            self._writer.arrived_on_host(move)
            for node in dict.fromkeys(spot.node for spot in move.spots):
                self.publisher.offer_path(nearest_attached(node))

    def _measure(self, source: Tier, family: int, done: CopyDone) -> None:
        if done.error is None:
            is_whole = bool(done.arrived.all())
            measured = self.costs.measured_load if is_whole else self.costs.measured_miss
            measured(source, family, len(done.arrived), done.seconds)

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that computed almost only prompts took this long (T05)."""
        self.costs.measured_prefill(num_tokens, seconds)

    def take_copies(self) -> tuple[Copy, ...]:
        """Copies for the step being planned, in the order in which they must run. States that it
        saves are findable from now on."""
        if self._is_sole:  # no other tier, and no state
            return ()
        self.publisher.announce_checkpoints()
        self._writer.sent()
        copies = self._states.take_copies() + self.prefetcher.take_intents()
        return copies + self.transfers.take_intents()

    def take_keeps(self) -> tuple[KeepStored, ...]:
        """Pages that storage is to keep longer, for the step being planned."""
        return self.marks.take_keeps() if self.marks.has_keeps else ()

    @property
    def has_keeps(self) -> bool:
        """Whether storage is to be told to keep pages longer."""
        return self.marks.has_keeps

    @property
    def has_transfers(self) -> bool:
        """Whether an acknowledgement is outstanding."""
        return self.transfers.num_under_way > 0 or bool(self.prefetcher.tickets())

    # Namespaces, counts

    def evict_namespace(self, namespace: Namespace) -> Evicted:
        """Free a namespace's pages on every tier. Pages that leases hold are freed when these end,
        and those leases publish no more. Does nothing for an unknown namespace."""
        return self._evict((namespace,))

    def evict_adapter(self, digest: AdapterDigest) -> Evicted:
        """Evict every tenant's namespace of an adapter."""
        known = [*self.index.tree.by_namespace]
        known += [ns for lease in self.open_leases.values() for ns in lease.key.namespaces]
        known += [ns for ticket in self.prefetcher.tickets() for ns in ticket.key.namespaces]
        return self._evict(dict.fromkeys(ns for ns in known if ns.adapter == digest))

    def evict_prefix(self, key: PrefixKey, tokens: Int32s) -> tuple[bytes, ...]:
        """Free a prompt's pages and everything after them, on the device and the host; returns
        their hashes, page by page. Leases that hold them continue and publish no more."""
        walk = self.lookup(key, tokens).walk
        if not walk.nodes:
            return ()
        top = walk.nodes[0]
        for lease in self.open_leases.values():
            node: Node | None = lease.cursor
            while node is not None and node is not top:
                node = node.parent
            if node is top:
                lease.num_allowed_pages = 0
        for ticket in self.prefetcher.tickets():
            ticket.is_barred |= ticket.key == key
        self.index.cut(top, top.first)
        self.keeper.drop_lost()
        hasher = self._hasher or PageHasher(self._policies.identity, self.page_size * TOKEN_BYTES)
        keys = tokens[: walk.depth * self.page_size].tobytes()
        return tuple(Ticket(key, top, 0, keys).hashes(hasher, hasher.root))

    @property
    def num_leases(self) -> int:
        """Requests that hold pages now."""
        return len(self.open_leases)

    def evict_all(self) -> Evicted:
        """Evict every namespace: nothing that was computed before will be found."""
        known = [*self.index.tree.by_namespace]
        known += [ns for lease in self.open_leases.values() for ns in lease.key.namespaces]
        known += [ns for ticket in self.prefetcher.tickets() for ns in ticket.key.namespaces]
        return self._evict(dict.fromkeys(known))

    def change_weights(self, identity: bytes) -> Evicted:
        """The weights change. Pages of the old weights are dropped from every tier here, and have
        other names in storage and in events. No lease may hold pages."""
        assert not self.open_leases, "a request would go on with what the old weights computed"
        evicted = self.evict_all()
        if self._hasher is not None:
            self._hasher.identify(identity)
        return evicted

    def _evict(self, namespaces: Collection[Namespace]) -> Evicted:
        before = [pool.num_free for pool in self.index.pools]
        for namespace in namespaces:
            for node in list(self.index.tree.by_namespace.get(namespace, {}).values()):
                if node.is_attached:
                    self.index.cut(node, node.first)
        if namespaces:
            for lease in self.open_leases.values():
                allowed = lease.key.first_page_of(namespaces)
                lease.num_allowed_pages = min(lease.num_allowed_pages, allowed)
            for ticket in self.prefetcher.tickets():
                ticket.is_barred |= ticket.key.first_page_of(namespaces) < ENDLESS
            self.keeper.drop_lost()
        after = [pool.num_free for pool in self.index.pools]
        return Evicted(tuple(b - a for a, b in zip(before, after, strict=True)))

    def is_held(self, family: int, unit: int) -> bool:
        """Whether any lease or transfer holds a unit on the device; for runners that check their
        plans."""
        return bool(self.index.pools[family].holders[unit])

    def take_events(self) -> list[CacheEvent]:
        events, self.index.events = self.index.events, []
        return events

    # Looking, which changes nothing

    def walk_tree(self, number: Callable[[Namespace], int]) -> TreeWalk:
        """A walk over the index; `number` maps a namespace to a number."""
        return TreeWalk(self.index, number)

    def held_by(self, lease: Lease) -> tuple[int, int]:
        """Pages of the first family that a lease holds, and the node that its path ends in."""
        return len(lease.tables[0]) - lease.first_live[0], nearest_attached(lease.cursor).serial

    def plane_views(self) -> list[PlaneView]:
        """Counts of every plane, which balance."""
        return plane_views(self.index)

    def next_evicted(self, most: int) -> list[tuple[int, int]]:
        """(node, pages) of the device's first plane, in eviction order, for at most this many
        nodes."""
        return [(node.serial, node.counts[0]) for node in self.evictors[0].in_order(most)]

    @property
    def num_uses(self) -> int:
        """The clock by which nodes record their last use."""
        return self.publisher.num_uses

    def stats(self) -> CacheStats:
        return CacheStats(
            planes=tuple(
                PlaneStats(plane.family.name, plane.tier, pool.num_units, pool.num_free,
                           pool.num_cached, pool.num_held)
                for plane, pool in zip(self.layout.planes, self.index.pools, strict=True)
            ),
            total_lookup_tokens=self._reuse.num_lookup_tokens,
            total_hit_tokens=self._reuse.num_hit_tokens,
            total_host_hit_tokens=self._reuse.num_host_hit_tokens,
            missed_tokens={limit.label: n for limit, n in self._reuse.missed_tokens.items()},
            total_skipped_checkpoints=self._states.num_skipped,
            total_failed_units=self.transfers.num_failed_units,
            storage=self.storage.stats() if self._policies.uses_storage else None,
        )  # fmt: skip


def _most_units(layout: CacheLayout) -> dict[int, int]:
    """By family that does not read all earlier tokens: the number of units that a request resumes
    from."""
    far = 1 << 20
    return {
        plane.family_index: 1
        if plane.family.is_state
        else far - plane.family.first_needed(far * layout.page_size)
        for plane in layout.device
        if not plane.family.is_ordered
    }
