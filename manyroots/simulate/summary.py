"""From records to the numbers people size a deployment by. Pure arithmetic on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from manyroots.ids import Tier
from manyroots.messages import FinishReason
from manyroots.simulate.records import Record
from manyroots.simulate.simulation import SimulationRun


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of times, in seconds; all 0 where there were none."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        array = np.array(list(values))
        if len(array) == 0:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (float(value) for value in np.percentile(array, [50, 90, 99]))
        return cls(float(array.mean()), p50, p90, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Sequences that have something in common."""

    name: str
    num_sequences: int
    num_prompt_tokens: int
    """Of sequences that began; the others were never looked up."""
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: Distribution

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers."""

    all: SequenceGroup
    by_adapter: list[SequenceGroup]
    by_namespace: list[SequenceGroup]
    """Adapter and salt together."""
    num_finished: int
    num_aborted: int
    num_failed: int
    duration_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    busy_share: float
    """Of the time, how much the device computed."""
    itl_s: Distribution
    """Between one token and the next of a sequence."""
    e2e_s: Distribution
    """Of sequences that said all they had to say."""
    num_steps: int
    num_failed_steps: int
    num_audits: int
    num_retractions: int
    num_pages: int
    peak_held_pages: int
    hit_rate_by_tier: dict[str, float]
    """Of the prompt tokens, what was found on the device and what was loaded back from the host;
    what came from storage passed through the host, and counts there."""
    num_copied_pages: dict[str, int]
    num_adapter_loads: dict[str, int]
    num_draft_tokens: int
    num_accepted_tokens: int
    plan_digest: str


def summarize(run: SimulationRun) -> Summary:
    records = run.records
    duration_s = max(run.duration_s, 1e-9)
    everything = _group("all", records)
    reasons = [record.finish_reason for record in records]
    assert run.settings.num_pages is not None
    return Summary(
        all=everything,
        by_adapter=_groups(records, adapter_name),
        by_namespace=_groups(records, namespace_name),
        num_finished=sum(record.is_whole for record in records),
        num_aborted=reasons.count(FinishReason.ABORT),
        num_failed=reasons.count(FinishReason.ERROR),
        duration_s=run.duration_s,
        output_tokens_per_s=everything.num_output_tokens / duration_s,
        prompt_tokens_per_s=everything.num_prompt_tokens / duration_s,
        busy_share=run.busy_s / duration_s,
        itl_s=Distribution.of(gap for record in records for gap in _gaps(record)),
        e2e_s=Distribution.of(record.e2e_s for record in records if record.is_whole),
        num_steps=run.num_steps,
        num_failed_steps=run.num_failed_steps,
        num_audits=run.num_audits,
        num_retractions=run.num_retractions,
        num_pages=run.settings.num_pages,
        peak_held_pages=run.peak_held_pages,
        hit_rate_by_tier=_by_tier(run, everything),
        num_copied_pages=run.num_copied_pages,
        num_adapter_loads=run.num_adapter_loads,
        num_draft_tokens=run.num_draft_tokens,
        num_accepted_tokens=run.num_accepted_tokens,
        plan_digest=run.plan_digest,
    )


def _by_tier(run: SimulationRun, everything: SequenceGroup) -> dict[str, float]:
    """The hit rate, split as the cache's own counts are; those include resumed requests."""
    host_share = run.num_host_hit_tokens / max(1, run.num_hit_tokens)
    host = everything.hit_rate * host_share
    return {Tier.DEVICE.value: everything.hit_rate - host, Tier.HOST.value: host}


def adapter_name(record: Record) -> str:
    return record.sequence.line.adapter or "(base)"


def namespace_name(record: Record) -> str:
    salt = record.sequence.line.salt
    return adapter_name(record) + ("" if salt is None else f" / {salt}")


def _groups(records: list[Record], name: Callable[[Record], str]) -> list[SequenceGroup]:
    members: dict[str, list[Record]] = {}
    for record in records:
        members.setdefault(name(record), []).append(record)
    return [_group(key, members[key]) for key in sorted(members)]


def _group(name: str, records: list[Record]) -> SequenceGroup:
    begun = [record for record in records if record.has_begun]
    return SequenceGroup(
        name=name,
        num_sequences=len(records),
        num_prompt_tokens=sum(record.sequence.line.num_prompt_tokens for record in begun),
        num_cached_tokens=sum(record.num_cached_tokens for record in begun),
        num_output_tokens=sum(record.num_tokens for record in begun),
        ttft_s=Distribution.of(record.ttft_s for record in begun),
    )


def _gaps(record: Record) -> list[float]:
    times = record.token_times_s
    return [after - before for before, after in pairwise(times)]
