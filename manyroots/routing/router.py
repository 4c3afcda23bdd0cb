"""Chooses the replica for each request, by the expected time to its first token.

Takes what replicas store and remove, what requests were given to which replica, and when their
first tokens came. Gives a replica's number. The same calls give the same choices: no clock, no
random draw, no I/O.

The expected time is the sum of

- the prompt tokens that wait at the replica and those of this request that are not cached there,
  times the seconds per token that the replica needed lately;
- the time to load cached tokens from lower tiers, and the adapter;
- the time until a batch slot is free, where all are taken.

Some costs fall on later requests. Tokens that are computed delay the requests after them, so they
count twice. A replica that was given more than its share of the work lately
evicts its own pages sooner, so its tokens count more. An adapter that has enough homes displaces
another one elsewhere, so its load counts more there.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from manyroots.errors import UnavailableError
from manyroots.ids import Tier
from manyroots.routing.adapter_places import AdapterPlaces
from manyroots.routing.page_index import PageIndex, members

ReplicaColumn = npt.NDArray[np.float64]
"""One number for each replica."""


class RoutingPolicy(enum.Enum):
    """How a replica is chosen."""

    EXPECTED_TTFT = "expected-ttft"
    LEAST_QUEUE = "least-queue"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCosts:
    """Seconds, until measurements replace the first one."""

    token_s: float = 1e-4
    """To compute one prompt token."""
    row_s: float = 5e-5
    """That one decoding row adds to a step, in each of which some prompt tokens are computed."""
    step_tokens: int = 2048
    """Prompt tokens of a step, at most."""
    lower_tier_share: float = 0.2
    """Of computing a token: loading it from the host or from storage."""
    adapter_s: dict[Tier, float] = field(
        default_factory=lambda: {Tier.DEVICE: 0.0, Tier.HOST: 0.02, Tier.STORAGE: 0.2}
    )
    """To bring an adapter to the device, by where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """What every replica of a deployment has."""

    page_size: int
    max_num_seqs: int
    max_loras: int = 0
    """0: no limit."""
    max_cpu_loras: int = 0


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What of a request decides where it goes."""

    hashes: Sequence[int]
    """Of its full pages, in its namespace (`prompt_hashes.py`)."""
    num_tokens: int
    adapter: str | None
    session: str | None = None
    """A hint: of replicas that are equally good, the one that had the session last is chosen."""


@dataclass(slots=True)
class _Open:
    """A request that a replica was given."""

    replica: int
    num_new_tokens: int
    adapter: str | None
    num_ahead: int
    """Prompt tokens until its first token, its own included."""
    expected: list[int]
    """Pages it was given that no event has confirmed."""
    has_begun: bool = False


_EVEN = 0.98
"""What earlier work still counts after each request."""
_FIRST_WORK = 4096.0
"""Prompt tokens that each replica starts with, so that one request makes little difference."""
_REFRESH_EVERY = 64
"""Requests after which every replica's share of the work is computed anew."""
DELAY = 1.0
"""How much more a request's own tokens count, because they delay the requests after it."""
PRESSURE = 4.0
"""How much more a token counts at a replica with twice the mean work. Over six traces and three
machines in the simulator, 4 kept every queue below 1.25 times the mean; 1 did not, and found no
more."""
DISPLACEMENT = 3.0
"""How much more an adapter's load counts where another adapter has to leave for it."""
SESSION_SHARE = 0.1
"""A session stays where it was unless that costs more than this share of its whole prompt."""
_SMOOTHING = 0.1
_FEWEST_TOKENS = 64
"""A first token after fewer tokens tells little of the seconds per token."""
_MAX_SESSIONS = 100_000


class Router:
    """The replicas of a deployment as their gateway knows them."""

    def __init__(
        self,
        num_replicas: int,
        limits: ReplicaLimits,
        *,
        policy: RoutingPolicy = RoutingPolicy.EXPECTED_TTFT,
        costs: RoutingCosts | None = None,
    ) -> None:
        self.num_replicas = num_replicas
        self.limits = limits
        self.policy = policy
        self.costs = costs or RoutingCosts()
        adapter_s = self.costs.adapter_s
        self._device_saves_s = adapter_s[Tier.STORAGE] - adapter_s[Tier.DEVICE]
        self._host_saves_s = adapter_s[Tier.STORAGE] - adapter_s[Tier.HOST]
        self.pages = PageIndex(num_replicas)
        self.adapters = AdapterPlaces(
            num_replicas, max_loras=limits.max_loras, max_cpu_loras=limits.max_cpu_loras
        )
        self.is_up = [True] * num_replicas
        self.num_up = num_replicas
        self.num_open = [0] * num_replicas
        self.open_adapters: dict[str, int] = {}
        """Requests under way, by adapter."""
        self._num_queued_tokens = [0] * num_replicas
        """Prompt tokens of requests without a first token."""
        self._measured_s = [self.costs.token_s] * num_replicas
        """Per prompt token, lately."""
        self._work = [_FIRST_WORK] * num_replicas
        """Prompt tokens computed, each request counted more than the one before it."""
        self._weight, self._total_work = 1.0, _FIRST_WORK * num_replicas
        # What a decision reads, for each replica; `_refresh` keeps it.
        self._first_s: ReplicaColumn = np.zeros(num_replicas)
        """Until a request's own tokens are computed; infinite while the replica is down."""
        self._token_s: ReplicaColumn = np.full(num_replicas, self.costs.token_s)
        """For each of the request's own tokens."""
        self._num_begun = 0
        self._open: dict[int, _Open] = {}
        self._expected: list[dict[int, int]] = [{} for _ in range(num_replicas)]
        """By replica: pages that requests under way will store, and how many of them will."""
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._next = 0
        self._refresh_all()

    # Deciding

    def choose(self, request: RouteRequest) -> int:
        """The replica for a request. Raises UnavailableError if none is up."""
        if not self.num_up:
            raise UnavailableError("no replica is up; try again in a moment")
        match self.policy:
            case RoutingPolicy.ROUND_ROBIN:
                return self._next_up([0] * self.num_replicas)
            case RoutingPolicy.LEAST_QUEUE:
                return self._next_up(self.num_open)
            case RoutingPolicy.EXPECTED_TTFT:
                return self._least(self._cost_s(request), request)

    def _cost_s(self, request: RouteRequest) -> ReplicaColumn:
        """For each replica, without what is the same for all of them."""
        cost_s = request.num_tokens - self._num_saved_tokens(request.hashes)
        cost_s *= self._token_s
        cost_s += self._first_s
        if request.adapter is not None:
            places, scale = self.adapters, 1.0
            on_device, on_host = places.on_device(request.adapter), places.on_host(request.adapter)
            if on_host.bit_count() >= places.target(request.adapter):
                scale += DISPLACEMENT
            # Relative to a load from storage, which the others need.
            if on_device:
                cost_s[members(on_device)] -= self._device_saves_s * scale
            if on_host := on_host & ~on_device:
                cost_s[members(on_host)] -= self._host_saves_s * scale
        return cost_s

    def _num_saved_tokens(self, hashes: Sequence[int]) -> ReplicaColumn:
        """By replica: tokens that need not be computed. Those of lower tiers count less."""
        saved = self._num_leading_tokens(Tier.DEVICE, hashes)
        if not self.pages.is_empty(Tier.HOST):  # what is in storage came through the host
            on_host = self._num_leading_tokens(Tier.HOST, hashes)
            saved += (1.0 - self.costs.lower_tier_share) * np.maximum(on_host - saved, 0.0)
        return saved

    def _num_leading_tokens(self, tier: Tier, hashes: Sequence[int]) -> ReplicaColumn:
        found = np.zeros(self.num_replicas)
        for replicas, num_pages in self.pages.leading(tier, hashes):
            found[members(replicas)] = self.limits.page_size * num_pages
        return found

    def _least(self, cost_s: ReplicaColumn, request: RouteRequest) -> int:
        least = int(cost_s.argmin())
        last = None if request.session is None else self._sessions.get(request.session)
        if last is not None:
            whole_s = request.num_tokens * self._token_s[last]
            if cost_s[last] <= cost_s[least] + SESSION_SHARE * whole_s:
                return last
        return least

    def _next_up(self, cost: list[int]) -> int:
        """The cheapest replica that is up, in rotation among equals."""
        order = [(self._next + i) % self.num_replicas for i in range(self.num_replicas)]
        return min((replica for replica in order if self.is_up[replica]), key=cost.__getitem__)

    # What happens

    def begin(self, request_id: int, replica: int, request: RouteRequest) -> None:
        """A request is given to a replica."""
        num_known = self.pages.num_leading(replica, Tier.DEVICE, request.hashes)
        expected = list(request.hashes[num_known:])
        pending = self._expected[replica]
        for page in expected:
            pending[page] = pending.get(page, 0) + 1
        self.pages.store(replica, Tier.DEVICE, expected)
        num_new = request.num_tokens - self.limits.page_size * num_known
        self._num_queued_tokens[replica] += num_new
        num_ahead = self._num_queued_tokens[replica]
        self._open[request_id] = _Open(replica, num_new, request.adapter, num_ahead, expected)
        if request.adapter is not None:
            self.open_adapters[request.adapter] = self.open_adapters.get(request.adapter, 0) + 1
        self.num_open[replica] += 1
        self._weight /= _EVEN
        self._work[replica] += self._weight * num_new
        self._total_work += self._weight * num_new
        self._num_begun += 1
        if self._num_begun % _REFRESH_EVERY:
            self._refresh(replica)
        else:
            self._refresh_all()
        self.adapters.use(replica, request.adapter)
        if request.session is not None:
            self._sessions[request.session] = replica
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._next = replica + 1

    def first_token(self, request_id: int, seconds: float) -> None:
        """A request's first token came, so many seconds after it was given away."""
        mine = self._open.get(request_id)
        if mine is None or mine.has_begun:
            return
        mine.has_begun = True
        self._settle(mine)
        if mine.num_ahead >= _FEWEST_TOKENS:
            measured = seconds / mine.num_ahead
            self._measured_s[mine.replica] += _SMOOTHING * (
                measured - self._measured_s[mine.replica]
            )
        self._refresh(mine.replica)

    def end(self, request_id: int) -> None:
        """A request is over, in whatever way."""
        mine = self._open.pop(request_id, None)
        if mine is None:
            return
        if not mine.has_begun:
            self._settle(mine)
        self.num_open[mine.replica] -= 1
        if mine.adapter is not None:
            self.open_adapters[mine.adapter] -= 1
            if not self.open_adapters[mine.adapter]:
                del self.open_adapters[mine.adapter]
        self._refresh(mine.replica)

    def _settle(self, mine: _Open) -> None:
        """Its prompt waits no more; pages that no event has confirmed are not there."""
        replica, pending = mine.replica, self._expected[mine.replica]
        self._num_queued_tokens[replica] -= mine.num_new_tokens
        missing = []
        for page in mine.expected:
            count = pending.get(page)
            if count == 1:
                del pending[page]
                missing.append(page)
            elif count is not None:
                pending[page] = count - 1
        self.pages.remove(replica, Tier.DEVICE, missing)

    def _refresh(self, replica: int) -> None:
        """Compute what decisions read of a replica."""
        costs, num_open = self.costs, self.num_open[replica]
        measured_s = self._measured_s[replica]
        # A step computes one token of each decoding row beside the prompts' tokens.
        token_s = measured_s + num_open * costs.row_s / costs.step_tokens
        self._first_s[replica] = self._num_queued_tokens[replica] * token_s
        # Where all batch slots are taken, one is free after about a prompt for each request.
        num_waiting = max(0, num_open + 1 - self.limits.max_num_seqs)
        work = self._work[replica] * self.num_replicas / self._total_work
        pressure = max(0.0, 1.0 + PRESSURE * (work - 1.0))
        self._token_s[replica] = token_s + (num_waiting + DELAY + pressure) * measured_s
        if not self.is_up[replica]:
            self._first_s[replica] = math.inf

    def _refresh_all(self) -> None:
        """The shares of work have changed; and weights must stay in the range of a float."""
        self._work = [work / self._weight for work in self._work]
        self._total_work /= self._weight
        self._weight = 1.0
        for replica in range(self.num_replicas):
            self._refresh(replica)

    def stored(self, replica: int, tier: Tier, hashes: Sequence[int]) -> None:
        """A replica can reuse these pages now."""
        self.pages.store(replica, tier, hashes)
        if tier is Tier.DEVICE:
            pending = self._expected[replica]
            for page in hashes:
                pending.pop(page, None)

    def removed(self, replica: int, tier: Tier, hashes: Sequence[int]) -> None:
        self.pages.remove(replica, tier, hashes)

    def lost(self, replica: int) -> None:
        """A replica is gone, or has emptied its cache: whatever was there has to come anew."""
        self.pages.forget(replica)
        self.adapters.forget(replica)
        self._expected[replica].clear()

    def set_up(self, replica: int, *, is_up: bool) -> None:
        """Whether a replica is given requests."""
        self.num_up += is_up - self.is_up[replica]
        self.is_up[replica] = is_up
        self._refresh(replica)
