"""Admission: takes requests from the queue, through fetching and loading, to a row.

Owns every request that does not run yet. Claims all requests that may start before any gets room,
and releases the claims of those that do not fit. Knows nothing of launched steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice

from manyroots.cache.cache import PrefixCache
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.config import SchedulerSettings
from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.registry import Hold
from manyroots.lora.residency import Residency
from manyroots.messages import CacheUse
from manyroots.scheduler.bursts import LOOK_AHEAD, Bursts
from manyroots.scheduler.fetches import Fetches
from manyroots.scheduler.lanes import Importance
from manyroots.scheduler.plan_builder import Placer, PlanBuilder
from manyroots.scheduler.policies.protocol import SchedulingPolicy
from manyroots.scheduler.queue import WaitingQueue, has_aged
from manyroots.scheduler.request import Request, State
from manyroots.scheduler.rows import Rows
from manyroots.scheduler.slices import AdapterSlices, Pause

MakeWay = Callable[[Request, PlanBuilder], bool]
"""Retracts a request that is less important than the given one; False if there is none."""
_cache_use = lru_cache(256)(CacheUse)
"""Nearly all requests have one of a few: none is ever changed, so they share it."""
LEAST_IMPORTANT = 2**63
"""Greater than the importance of any request."""


class Admission:
    """Waiting requests, and their way into the batch."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cache: PrefixCache,
        adapters: Residency,
        rows: Rows,
        policy: SchedulingPolicy,
        *,
        max_model_len: int,
    ) -> None:
        self._cache = cache
        self._adapters = adapters
        self._rows = rows
        self._importance = policy.importance
        self._charges_tokens = policy.charges_tokens
        self._placer = Placer(settings, cache)
        self._max_model_len = max_model_len
        self.waiting = WaitingQueue(policy)
        self.slices = AdapterSlices(adapters, rows, self.waiting, settings.adapter_quantum_steps)
        self.fetches = Fetches(cache, self.waiting, self.slices, rows)
        self.bursts = Bursts(cache, rows, policy.importance)
        self._loading: dict[Request, None] = {}
        self._loaded: deque[Request] = deque()
        self._is_line_held = False
        """Whether the first waiting request has aged and lacks pages: until it has them, no other
        starts."""
        self.total_storage_hit_tokens = 0

    def __len__(self) -> int:
        begun = len(self.fetches) + len(self._loading) + len(self._loaded)
        return len(self.waiting) + len(self.bursts.followers) + begun

    def most_important(self, importance: Importance) -> int:
        """The importance of the most important request that is queued or loaded."""
        head = self.waiting.head
        first = () if head is None else (head,)
        return min(map(importance, (*first, *self._loaded)), default=LEAST_IMPORTANT)

    def _is_less(self, request: Request, least: int) -> bool:
        """Whether a request is less important than `least`."""
        return self._importance is not None and self._importance(request) > least

    # Coming and going

    def queue(self, request: Request) -> None:
        """Add a new request to the queue, or first wait for its pages in storage."""
        if request.hold is not None:
            self.slices.arrive(request.hold.digest)
        if not request.wants_prompt_logprobs and self.fetches.begin(request):
            # Storage answers while others run; only this request waits for it (T04).
            request.state = State.FETCHING
        else:
            self.waiting.push(request)

    def queue_again(self, request: Request, step_id: StepId) -> None:
        """A request lost its row while `step_id` was planned."""
        request.state = State.WAITING
        request.since = step_id
        self.waiting.push(request)

    def remove(self, request: Request) -> None:
        """A request that does not run is finished."""
        if self.bursts.followers.pop(request, None) is not None:
            self.waiting.policy.close(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.FETCHING:
            self.waiting.policy.close(request)
        else:
            # The transfer, not the lease, holds units that are being copied (T08).
            if request in self._loading:
                del self._loading[request]
            else:
                self._loaded.remove(request)
            self._drop_claim(request)
            self.waiting.policy.close(request)
        self.fetches.end(request)
        request.state = State.FINISHED

    def copies_ended(self) -> None:
        """Requests whose units have all arrived can continue."""
        self._push_all(self.fetches.take_answers())
        self._sort_loading()

    def lose_patience(self, step_id: StepId) -> None:
        """Requests that have waited long enough for storage continue without it."""
        if self.fetches.fetching:
            self._push_all(self.fetches.lose_patience(step_id))

    def fetch(self, step_id: StepId) -> None:
        """Ask storage for requests for which there is room now."""
        if self.fetches.in_line:
            self._push_all(self.fetches.ask_in_order(step_id))

    def start_over(self) -> None:
        """The prefixes that loading requests found may never have been filled: look them up
        again."""
        self._give_up([*self._loading, *self._loaded])
        self._loading.clear()
        self._loaded.clear()

    def give_way(self) -> bool:
        """Running requests lack memory. The last request that has loaded its units but does not run
        yet releases them and waits again. False if there is none.

        Its pages are still on the host, while a running request would have to recompute its own.
        """
        if self._loaded:
            request = self._loaded.pop()
        elif self._loading:
            request, _ = self._loading.popitem()
        else:
            return False
        self._give_up([request])
        return True

    def _push_all(self, requests: list[Request]) -> None:
        """These requests no longer wait for storage."""
        for request in requests:
            request.state = State.WAITING
            self.waiting.push(request)

    def _sort_loading(self) -> None:
        for request in list(self._loading):
            lease = request.lease
            assert lease is not None
            if not lease.is_ready:
                continue
            del self._loading[request]
            if lease.has_failed:
                self._give_up([request])
            else:
                self._loaded.append(request)

    # Beginning

    def admit(
        self,
        builder: PlanBuilder,
        make_way: MakeWay | None = None,
        least: int = LEAST_IMPORTANT,
    ) -> set[AdapterDigest | None]:
        """Start requests whose units have arrived, then waiting requests in order, until one does
        not fit. All that may start are claimed before any gets room (C01). Returns the adapters
        whose requests found no room.

        `make_way`: if given, importance counts. A request takes the row and pages of less important
        ones, and while one finds no room, nothing less important starts. `least`: nothing less
        important than this starts either.
        """
        without_room: set[AdapterDigest | None] = set()
        if self._loaded and not self._begin_loaded(builder, least):
            return without_room
        if not len(self.waiting) or not (self._rows.free or make_way) or self._is_line_held:
            return without_room
        if self.slices.without_row:
            self._begin_first_rows(builder, without_room, least)
        is_open = self.slices.open_lanes()
        for adapter in without_room:
            is_open.pop(adapter, None)
        while builder.num_tokens_left > 0 and (
            claimed := self._claim(builder, is_open, make_way, least)
        ):
            for index, request in enumerate(claimed):
                if self._begin(request, builder, claimed[index + 1 :]):
                    continue
                # The later claims may be what blocks it.
                self._give_up(claimed[index + 1 :])
                if self._begin(request, builder) or self._begin_instead(request, builder, make_way):
                    break
                self._give_up([request])
                if not self._rows.free:
                    return without_room
                if make_way is not None and self._importance is not None:
                    least = self._importance(request)
                # This must not block requests of other adapters (L03).
                adapter = request.group[0]
                is_open.pop(adapter, None)  # claiming may have closed it already
                self._found_no_room(adapter, without_room)
                break
        return without_room

    def _begin_first_rows(
        self, builder: PlanBuilder, without_room: set[AdapterDigest | None], least: int
    ) -> None:
        """Start the first request of each entry without a row: one was freed for it."""
        for adapter in list(self.slices.without_row):
            lane = self.waiting.lanes.get(adapter)
            if not self._rows.free or builder.num_tokens_left == 0:
                return
            if lane is None or self._is_less(lane.head, least):
                continue
            if lane.head.num_in_flight_tokens or not self.slices.is_open(adapter):
                continue
            request = self.waiting.pop(lane)
            self._find(request)
            if not self._begin(request, builder):
                self._give_up([request])
                self._found_no_room(adapter, without_room)
            del self.slices.without_row[adapter]

    def _found_no_room(
        self, adapter: AdapterDigest | None, without_room: set[AdapterDigest | None]
    ) -> None:
        without_room.add(adapter)
        if adapter is not None:
            self.slices.give_up(adapter)

    def choose_adapters(self, step_id: StepId, pause: Pause) -> None:
        """Choose the adapters that run in this step; pauses requests of others for them."""
        if self.bursts.is_on:
            for request in self.bursts.take_ready():
                self.waiting.push(request)
        self._is_line_held = False
        head = self.waiting.head
        if head is not None and has_aged(head, step_id):
            self._is_line_held = not self._has_room(head)
        self.slices.begin_step(step_id, self._ready, self._has_room, pause)

    def prepare_adapters(self, without_room: set[AdapterDigest | None]) -> None:
        """Load weights for requests that do not run yet."""
        self.slices.prepare(self._ready, without_room)

    @property
    def _ready(self) -> tuple[Request, ...]:
        return (*self._loaded, *self._loading)

    def _has_room(self, request: Request) -> bool:
        """Whether there are pages for a waiting request to start now, including those that less
        important requests would give up."""
        if request.lease is not None:
            return True
        # Copies in progress hold pages too.
        if not (self._are_others or self._cache.has_transfers):
            return True
        if self._is_line_held:
            return False
        if self._importance is not None:
            begun = (*self._rows.running, *self.slices.paused_requests())
            if any(self._is_less(other, self._importance(request)) for other in begun):
                return True
        if self._cache.has_room_for(self._num_wanted(request, len(self._rows.running))):
            return True
        lease = self._look_up(request)
        has_room = self._could_go_on(request, lease)
        self._cache.release(lease, Ending.DROPPED)
        return has_room

    def _begin_loaded(self, builder: PlanBuilder, least: int) -> bool:
        """Start requests whose units have arrived, in that order, except those whose adapter may
        not run now or that are less important than `least`. False if one finds no room: running
        requests will make some."""
        for request in list(self._loaded):
            if not self._rows.free or builder.num_tokens_left == 0:
                return False
            if request not in self._loaded or self._is_less(request, least):
                continue
            if not self.slices.is_open(request.group[0]):
                continue
            self._loaded.remove(request)
            if self._begin(request, builder):
                continue
            if self._rows.is_busy:
                self._loaded.appendleft(request)
                return False
            # Only other requests that hold loaded units can make room.
            self._give_up([*self._loaded])
            self._loaded.clear()
            if not self._begin(request, builder):
                self._give_up([request])
                return False
        return True

    def _claim(
        self,
        builder: PlanBuilder,
        is_open: dict[AdapterDigest | None, None],
        make_way: MakeWay | None,
        least: int,
    ) -> list[Request]:
        """Take requests off the queue with their claimed prefixes, as many as may fit. If no row is
        free, take at most one that displaces another. None is less important than `least`. Closes
        lanes that must wait for what a launched step computes."""
        claimed: list[Request] = []
        waiting, num_free = self.waiting, len(self._rows.free)
        importance, num_tokens_left = self._importance, builder.num_tokens_left
        keeps_rows = self.slices.keeps_rows
        order = waiting.lanes_in_order(is_open)
        while len(claimed) < (num_free or 1) and num_tokens_left > 0:
            lane = waiting.next_lane(order, is_open)
            if lane is None:
                break
            head = lane.head
            if importance is not None and importance(head) > least:
                break
            num_kept = self.slices.num_kept_rows(lane.adapter) if keeps_rows else 0
            is_kept = num_kept > 0 and num_free - len(claimed) <= num_kept
            if head.num_in_flight_tokens > 0 or is_kept:
                # It was just retracted and its last token is not known yet, or the remaining rows
                # are reserved for others.
                del is_open[lane.adapter]
                order = waiting.lanes_in_order(is_open)
                continue
            if num_free == 0 and not (make_way and make_way(head, builder)):
                break
            request = waiting.pop(lane)
            lease = self._find(request)
            num_tokens_left -= request.num_known_tokens - lease.num_cached_tokens
            claimed.append(request)
        return claimed

    def _look_up(self, request: Request) -> Lease:
        may_reuse = not request.wants_prompt_logprobs
        retention = request.submit.retention
        tokens, num_tokens = request.known_tokens, request.num_known_tokens
        return self._cache.claim(request.key, tokens, num_tokens, may_reuse, retention)

    def _find(self, request: Request) -> Lease:
        lease = self._look_up(request)
        request.lease = lease
        if request.skips_storage:
            lease.blame_storage()
        if self._charges_tokens:
            self.waiting.charge(request, self._num_known(request, lease))
        return lease

    def _num_known(self, request: Request, lease: Lease) -> int:
        """The tokens that a tenant is charged when its request starts: known tokens that must be
        computed, except the last. The last is charged with the token that it samples."""
        return request.num_known_tokens - lease.num_cached_tokens - 1

    def _drop_claim(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None
        if self._charges_tokens:
            self.waiting.charge(request, -self._num_known(request, lease))
        self._cache.release(lease, Ending.DROPPED)
        request.lease = None

    def _give_up(self, claimed: list[Request]) -> None:
        """Release the claims of requests that do not fit (C03)."""
        for request in reversed(claimed):
            if request.lease is not None:
                self._drop_claim(request)
            request.state = State.WAITING
            self.waiting.push(request)

    def _begin_instead(
        self, request: Request, builder: PlanBuilder, make_way: MakeWay | None
    ) -> bool:
        """Start a claimed request that lacks pages by displacing less important ones."""
        while (
            make_way is not None
            and self._has_place(request, builder)
            and make_way(request, builder)
        ):
            if self._begin(request, builder):
                return True
        return False

    def _has_place(self, request: Request, builder: PlanBuilder) -> bool:
        """Whether a request could start now if it had pages."""
        adapter = request.group[0]
        if (
            len(self._rows.free) <= self.slices.num_kept_rows(adapter)
            or builder.num_tokens_left == 0
        ):
            return False
        return adapter is None or self.slices.is_open(adapter)

    def _begin(
        self, request: Request, builder: PlanBuilder, behind: Sequence[Request] = ()
    ) -> bool:
        """Start a claimed request, or start loading what it found; False if there is no room.
        `behind`: the requests claimed after it."""
        lease = request.lease
        assert lease is not None
        if self._cache.could_find_more(lease):
            self._drop_claim(request)
            lease = self._find(request)
        if not self._has_place(request, builder):
            return False
        if self.bursts.is_on:
            if self.bursts.follow(request, lease):
                self._drop_claim(request)
                request.state = State.WAITING
                return True
            queued = islice(self.waiting.lanes.get(request.group[0], ()), LOOK_AHEAD)
            self.bursts.lead(request, lease, (*behind, *queued))
        if not lease.onboarding:
            return self._begin_ready(request, lease, builder)
        # A single request may compute while its pages arrive; otherwise others would wait for them.
        is_alone = builder.is_empty and not self._are_others
        overlaps = is_alone and self._cache.may_overlap(lease)
        if self._cache.onboard(lease, overlaps=overlaps) is Refusal.NO_ROOM:
            return False
        if not overlaps or not self._begin_ready(request, lease, builder):
            request.state = State.LOADING
            self._loading[request] = None
            self.fetches.loads(request)
        return True

    def _begin_ready(self, request: Request, lease: Lease, builder: PlanBuilder) -> bool:
        """Start a request whose units are ready; False if there is no room for what follows."""
        computed = lease.num_cached_tokens
        are_others = self._rows.running or self.slices.num_paused_requests
        if are_others and not self._could_go_on(request, lease):
            return False
        num_tokens = self._placer.chunk(request, lease, computed, builder)
        end, most_tokens = computed + num_tokens, request.max_num_tokens - 1
        extension = self._cache.extend(lease, computed, end, builder.step_id, most_tokens)
        if isinstance(extension, Refusal):
            return False
        self._start(request, lease, builder)
        self._placer.place(request, lease, computed, num_tokens, builder)
        return True

    @property
    def _are_others(self) -> bool:
        return bool(self._rows.running or self.slices.num_paused_requests)

    def _could_go_on(self, request: Request, lease: Lease) -> bool:
        """While others run, start only a request that can finish its prompt and a page of output
        while each of them gets its next page. Starting more would end in retractions."""
        cache, rows = self._cache, self._rows
        computed, most = lease.num_cached_tokens, self._placer.most_step_tokens
        # Usually there is more room than needed, and nothing to count.
        wanted = self._num_wanted(request, len(rows.running))
        if cache.can_reach(lease, computed, wanted, most):
            return True
        wanted = self._num_wanted(request, rows.num_growing)
        return cache.can_reach(lease, computed, wanted, most)

    def _num_wanted(self, request: Request, num_growing: int) -> int:
        """The tokens that there must be room for to start a request beside so many rows that need
        a page."""
        rows, page_size = self._rows, self._cache.page_size
        enough = min(request.num_known_tokens + page_size, self._max_model_len)
        of_prompts = rows.num_pages_of_prompts() if rows.prompts else 0
        return enough + (num_growing + of_prompts) * page_size

    def _start(self, request: Request, lease: Lease, builder: PlanBuilder) -> None:
        if request.hold is not None:
            self.seat(request.hold)
        request.state = State.RUNNING
        request.since = builder.step_id
        if self.fetches.has_any:
            self.fetches.end(request)
        if request.prompt_logprobs:
            request.prompt_logprobs.clear()
        is_first = request.num_cached_tokens is None
        if is_first:
            request.num_cached_tokens = lease.num_cached_tokens
            num_host = lease.num_host_tokens
            num_stored = min(request.num_fetched_tokens, num_host) if num_host else 0
            self.total_storage_hit_tokens += num_stored
            request.cache_use = _cache_use(num_host - num_stored, num_stored, lease.limit.label)
        if not request.wants_prompt_logprobs:
            self._cache.begin(lease, request.num_known_tokens, is_first)
        num_computed = lease.num_cached_tokens
        builder.arrive(request, self._rows.sit(request, num_computed), lease, num_computed)

    def seat(self, hold: Hold) -> None:
        """A request runs with its adapter from now on."""
        self.slices.seated(hold.digest)
        self._adapters.seat(hold)
