"""The last minutes of traffic under other settings: `manyroots simulate`, in a process of its own.

Takes the traffic without texts, the engine's sizes and the times of its last steps; gives the same
figures for the traffic as it was measured, as the simulator sees it, and for each change of the
settings. One replay at a time, at the lowest priority, and ended when its page goes away.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from manyroots.api.state import Service
from manyroots.config import Policy
from manyroots.errors import OverloadedError, RequestError, UnavailableError
from manyroots.observe.traffic import TrafficRing
from manyroots.snapshot import StepView

LIMIT_S = 180.0
MAX_VARIANTS = 6
MIN_STEPS = 8
_PROGRAM = (
    "import os, sys; os.nice(5); from manyroots.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


class Variant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is changed; factors of 1 change nothing."""

    name: str
    memory: float = 1.0
    adapters: float = 1.0
    traffic: float = 1.0
    policy: str | None = None


class SimulateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /page/simulate"""

    variants: list[Variant]


class Figures(msgspec.Struct, kw_only=True):
    """Of one replay, or as measured. None: not known."""

    output_tokens_per_s: float
    hit_rate: float
    first_token_s: list[float | None]
    """p50 and p99."""
    between_s: list[float | None]
    retractions: int | None = None
    peak_pages: int | None = None
    adapter_loads: int | None = None
    duration_s: float


class Column(msgspec.Struct, kw_only=True):
    name: str
    figures: Figures


class Simulated(msgspec.Struct, kw_only=True):
    num_requests: int
    seconds: float
    num_steps: int
    costs: list[tuple[str, str]]
    columns: list[Column]


class WhatIf:
    """Replays, one at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(
        self,
        request: SimulateRequest,
        service: Service,
        traffic: TrafficRing,
        sizes: dict[str, int],
        steps: Sequence[StepView],
    ) -> Simulated:
        _check(request.variants)
        measured = traffic.measured()
        if not measured.num_sequences:
            raise RequestError("No request has ended yet; there is nothing to replay.", field=None)
        costs = fitted(steps, sizes)
        if self._lock.locked():
            raise OverloadedError("A replay runs already; try again later.", retry_after_s=5)
        policy = service.engine.info.scheduling_policy
        first = measured.first_token_s
        between = service.metrics.recent_gaps.percentiles(0.5, 0.99)
        columns = [
            Column(
                name="As measured",
                figures=Figures(
                    output_tokens_per_s=measured.num_output_tokens / max(measured.seconds, 1e-3),
                    hit_rate=measured.num_cached_tokens / max(measured.num_prompt_tokens, 1),
                    first_token_s=[_at(first, 0.5), _at(first, 0.99)],
                    between_s=[between[0], between[1]],
                    duration_s=measured.seconds,
                ),
            )
        ]
        async with self._lock:
            with tempfile.TemporaryDirectory(prefix="manyroots-what-if-") as folder:
                trace = Path(folder) / "trace.jsonl"
                trace.write_text("".join(traffic.lines()))
                async with asyncio.timeout(LIMIT_S):
                    for variant in (Variant(name="As it is, simulated"), *request.variants):
                        flags = _flags(variant, sizes, policy, costs)
                        figures = await _simulate(trace, flags, Path(folder) / "result.json")
                        columns.append(Column(name=variant.name, figures=figures))
        return Simulated(
            num_requests=measured.num_sequences,
            seconds=measured.seconds,
            num_steps=len(steps),
            costs=[(name.replace("_", " "), f"{value:.3g}") for name, value in costs.items()],
            columns=columns,
        )


def fitted(steps: Sequence[StepView], sizes: dict[str, int]) -> dict[str, float]:
    """The simulator's costs of a step, by least squares over measured ones: a fixed time, one per
    prompt token and one per row that decodes. None is below what a clock can tell."""
    done = [step for step in steps if step.milliseconds > 0 and step.num_rows > 0]
    if len(done) < MIN_STEPS:
        raise RequestError(
            f"{len(done)} steps were measured, and {MIN_STEPS} are needed to know what one costs; "
            "send some requests first.",
            field=None,
        )
    rows = np.array(
        [[1.0, step.num_prompt_tokens, step.num_decode_tokens] for step in done], np.float64
    )
    seconds = np.array([step.milliseconds / 1000 for step in done])
    # A step that others held up must not decide: what takes far longer than usual is cut.
    seconds = np.minimum(seconds, np.quantile(seconds, 0.98))
    fixed, prompt, decode = _not_below_zero(rows, seconds)
    return {
        "step_overhead_s": max(fixed, 1e-6),
        "prefill_tokens_per_s": 1 / max(prompt, 1e-7),
        "prefill_pair_s": 0.0,
        "decode_row_s": decode,
        "decode_context_token_s": 0.0,
        "kv_bytes_per_token": max(sizes["page_bytes"] / sizes["block_size"], 1.0),
        "adapter_bytes": max(float(sizes["slot_bytes"]), 1.0),
    }


def _not_below_zero(rows: Any, seconds: Any) -> tuple[float, float, float]:
    """Least squares without negative costs: a column that would have one is left out."""
    kept = [0, 1, 2]
    found = np.zeros(3)
    while kept:
        found[:] = 0.0
        found[kept] = np.linalg.lstsq(rows[:, kept], seconds, rcond=None)[0]
        below = [column for column in kept if found[column] < 0]
        if not below:
            break
        kept = [column for column in kept if column not in below]
    fixed, prompt, decode = found.tolist()
    return fixed, prompt, decode


def _flags(
    variant: Variant, sizes: dict[str, int], policy: str, costs: dict[str, float]
) -> list[str]:
    numbers = {
        "block-size": sizes["block_size"],
        "num-pages": max(1, round(sizes["num_pages"] * variant.memory)),
        "num-host-pages": round(sizes["num_host_pages"] * variant.memory),
        "max-num-seqs": sizes["max_num_seqs"],
        "max-num-batched-tokens": sizes["max_num_batched_tokens"],
        "max-loras": round(sizes["max_loras"] * variant.adapters),
        "speedup": variant.traffic,
    }
    flags = [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
    flags += ["--scheduling-policy", variant.policy or policy]
    return flags + [part for name, value in costs.items() for part in ("--cost", f"{name}={value}")]


async def _simulate(trace: Path, flags: list[str], result: Path) -> Figures:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, "simulate", str(trace), "--json", str(result), *flags,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise UnavailableError(f"The replay ended with {process.returncode}: {''.join(last)[:500]}")
    summary = json.loads(await asyncio.to_thread(result.read_text))["summary"]
    ttft, gaps = summary["all"]["ttft_s"], summary["itl_s"]
    return Figures(
        output_tokens_per_s=summary["output_tokens_per_s"],
        hit_rate=summary["all"]["hit_rate"],
        first_token_s=[ttft["p50"], ttft["p99"]],
        between_s=[gaps["p50"], gaps["p99"]],
        retractions=summary["num_retractions"],
        peak_pages=summary["peak_held_pages"],
        adapter_loads=sum(summary["num_adapter_loads"].values()),
        duration_s=summary["duration_s"],
    )


def _check(variants: list[Variant]) -> None:
    if len(variants) > MAX_VARIANTS:
        raise RequestError(
            f"{len(variants)} variants are too many; send at most {MAX_VARIANTS}.", field="variants"
        )
    for variant in variants:
        for name in ("memory", "adapters", "traffic"):
            value = getattr(variant, name)
            if not 0.1 <= value <= 10:
                raise RequestError(
                    f"{name} is {value}; send a factor from 0.1 to 10.", field=f"variants.{name}"
                )
        policies = [policy.value for policy in Policy]
        if variant.policy is not None and variant.policy not in policies:
            raise RequestError(
                f"policy is {variant.policy[:60]!r}; choose one of {', '.join(policies)}.",
                field="variants.policy",
            )


def _at(ascending: list[float], share: float) -> float | None:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else None
