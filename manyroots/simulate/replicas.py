"""Several engines and the router that gives them requests, on virtual time.

Each replica is a whole simulated engine with its own clock. At each arrival all replicas have
reached that moment, the router has heard of their pages and first tokens, and chooses one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from manyroots.cache.events import CacheEvent, PagesStored
from manyroots.cache.keys import short_hash
from manyroots.errors import ConfigError
from manyroots.ids import Tier
from manyroots.messages import Output
from manyroots.routing.prompt_hashes import PromptHasher
from manyroots.routing.router import (
    ReplicaLimits,
    Router,
    RouteRequest,
    RoutingCosts,
    RoutingPolicy,
)
from manyroots.simulate.costs import CostModel
from manyroots.simulate.faults import NO_FAULTS
from manyroots.simulate.records import Record
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import EngineSimulation, SimulationRun, quiet_loop
from manyroots.simulate.trace import Trace
from manyroots.simulate.traffic import TraceSequence, sequences

MAX_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class ReplicasRun:
    """What a simulation of replicas gave."""

    policy: RoutingPolicy
    runs: list[SimulationRun]
    """Of each replica."""
    mean_open: list[float]
    """Of each replica: requests that it had, averaged over arrivals."""

    @property
    def merged(self) -> SimulationRun:
        """All replicas as one run: records and counts together."""
        first, runs = self.runs[0], self.runs
        loads = {tier: sum(r.num_adapter_loads[tier] for r in runs) for tier in (
            Tier.HOST.value, Tier.STORAGE.value
        )}  # fmt: skip
        copied: dict[str, int] = {}
        for run in runs:
            for name, count in run.num_copied_pages.items():
                copied[name] = copied.get(name, 0) + count
        return replace(
            first,
            records=sorted(
                (record for run in runs for record in run.records),
                key=lambda record: record.sequence.request_id,
            ),
            duration_s=max(run.duration_s for run in runs),
            busy_s=sum(run.busy_s for run in runs) / len(runs),
            num_steps=sum(run.num_steps for run in runs),
            num_retractions=sum(run.num_retractions for run in runs),
            num_pauses=sum(run.num_pauses for run in runs),
            num_hit_tokens=sum(run.num_hit_tokens for run in runs),
            num_host_hit_tokens=sum(run.num_host_hit_tokens for run in runs),
            num_copied_pages=copied,
            num_adapter_loads=loads,
            num_draft_tokens=sum(run.num_draft_tokens for run in runs),
            num_accepted_tokens=sum(run.num_accepted_tokens for run in runs),
            plan_digest=" ".join(run.plan_digest for run in runs),
        )

    @property
    def queue_ratio(self) -> float:
        """The longest mean queue of a replica, over the mean of all."""
        mean = float(np.mean(self.mean_open))
        return max(self.mean_open) / mean if mean else 1.0


def simulate_replicas(
    trace: Trace,
    settings: SimulationSettings,
    costs: CostModel,
    *,
    num_replicas: int,
    policy: RoutingPolicy,
    seed: int,
) -> ReplicasRun:
    """Run a trace to its end on `num_replicas` engines with these settings each."""
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise ConfigError(f"--replicas is {num_replicas}; it must be from 1 to {MAX_REPLICAS}.")
    with quiet_loop():
        return _Replicas(trace, settings.with_pages(costs), costs, num_replicas, policy, seed).run()


class _Replicas:
    """Engines and their router under way."""

    def __init__(
        self,
        trace: Trace,
        settings: SimulationSettings,
        costs: CostModel,
        num_replicas: int,
        policy: RoutingPolicy,
        seed: int,
    ) -> None:
        self._hasher = PromptHasher(b"", settings.block_size)
        self._coming = sequences(trace)
        limits = settings.adapter_limits()
        self.router = Router(
            num_replicas,
            ReplicaLimits(
                page_size=settings.block_size,
                max_num_seqs=settings.max_num_seqs,
                max_loras=limits.max_loras,
                max_cpu_loras=limits.max_cpu_loras,
            ),
            policy=policy,
            costs=routing_costs(costs, settings),
        )
        self._replicas = [
            EngineSimulation(
                trace, settings, costs, seed, NO_FAULTS, False, _Events(self.router, number)
            )
            for number in range(num_replicas)
        ]
        for replica in self._replicas:
            replica.on_output = self._tell
        self._policy = policy

    def run(self) -> ReplicasRun:
        num_open = np.zeros(len(self._replicas))
        for sequence in self._coming:
            self._give(sequence)
            num_open += np.array(self.router.num_open)
        for replica in self._replicas:
            replica.advance_to(math.inf)
        mean_open = num_open / max(1, len(self._coming))
        runs = [replica.finish() for replica in self._replicas]
        return ReplicasRun(self._policy, runs, mean_open.tolist())

    def _give(self, sequence: TraceSequence) -> None:
        line = sequence.line
        for replica in self._replicas:
            replica.advance_to(line.arrival_s)
        request = RouteRequest(
            self._hasher.hashes(line.prompt_tokens().tolist(), sequence.namespace()),
            line.num_prompt_tokens,
            line.adapter,
        )
        chosen = self.router.choose(request)
        self.router.begin(sequence.request_id, chosen, request)
        self._replicas[chosen].receive(line.arrival_s, sequence)

    def _tell(self, output: Output, record: Record) -> None:
        if record.num_tokens == len(output.tokens):
            self.router.first_token(output.request_id, record.ttft_s)
        if output.finish_reason is not None:
            self.router.end(output.request_id)


class _Events:
    """Tells the router what one replica stores and removes."""

    def __init__(self, router: Router, replica: int) -> None:
        self._router = router
        self._replica = replica

    def publish(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            hashes = [short_hash(page) for page in event.hashes]
            if isinstance(event, PagesStored):
                self._router.stored(self._replica, event.tier, hashes)
            else:
                self._router.removed(self._replica, event.tier, hashes)

    def close(self) -> None:
        """Nothing is kept here."""


def routing_costs(costs: CostModel, settings: SimulationSettings) -> RoutingCosts:
    """What the router would have measured on this machine."""
    token_s = 1 / costs.prefill_tokens_per_s
    return RoutingCosts(
        token_s=token_s,
        row_s=costs.step_overhead_s / settings.max_num_seqs + costs.decode_row_s,
        step_tokens=settings.max_num_batched_tokens,
        lower_tier_share=min(1.0, costs.kv_bytes_per_token / costs.host_bytes_per_s / token_s),
        adapter_s={tier: costs.adapter_load_s(tier) for tier in Tier},
    )
