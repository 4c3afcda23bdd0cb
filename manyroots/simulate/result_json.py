"""A run as JSON: what was simulated, exactly, and what came of it, request by request."""

from __future__ import annotations

import dataclasses
from typing import Any

from manyroots.simulate.costs import CostModel
from manyroots.simulate.faults import Faults
from manyroots.simulate.records import Record
from manyroots.simulate.replicas import ReplicasRun
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import SimulationRun
from manyroots.simulate.summary import SequenceGroup, Summary, summarize
from manyroots.simulate.sweep import Point


def setup_json(
    settings: SimulationSettings, costs: CostModel, faults: Faults, *, seed: int
) -> dict[str, Any]:
    """Everything that, with the trace, decides the result."""
    return {
        "seed": seed,
        "settings": dataclasses.asdict(settings),
        "costs": dataclasses.asdict(costs),
        "faults": dataclasses.asdict(faults),
    }


def run_json(run: SimulationRun) -> dict[str, Any]:
    return {
        "summary": summary_json(summarize(run)),
        "sequences": [_record_json(record) for record in run.records],
    }


def replicas_json(run: ReplicasRun) -> dict[str, Any]:
    return {
        "policy": run.policy.value,
        "queue_ratio": run.queue_ratio,
        "mean_open": run.mean_open,
        "summary": summary_json(summarize(run.merged)),
    }


def point_json(point: Point) -> dict[str, Any]:
    return {"values": point.values, "summary": summary_json(point.summary)}


def summary_json(summary: Summary) -> dict[str, Any]:
    values = dataclasses.asdict(summary)
    values["all"] = _group_json(summary.all)
    values["by_adapter"] = [_group_json(group) for group in summary.by_adapter]
    values["by_namespace"] = [_group_json(group) for group in summary.by_namespace]
    return values


def _group_json(group: SequenceGroup) -> dict[str, Any]:
    return {**dataclasses.asdict(group), "hit_rate": group.hit_rate}


def _record_json(record: Record) -> dict[str, Any]:
    line = record.sequence.line
    return {
        "arrival_s": record.arrival_s,
        "adapter": line.adapter,
        "salt": line.salt,
        "num_prompt_tokens": line.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_output_tokens": record.num_tokens,
        "ttft_s": record.ttft_s if record.has_begun else None,
        "e2e_s": record.e2e_s if record.is_whole else None,
        "finish_reason": None if record.finish_reason is None else record.finish_reason.value,
    }
