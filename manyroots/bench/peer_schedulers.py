"""TokenSpeed's C++ scheduler (the `tokenspeed-scheduler` wheel) on the cases of `bench scheduler`.

Takes a folder that a wheel was installed into with `pip install --no-deps --target`; two
generations of its interface are known, by what the module offers. Each wheel is driven in a
process of its own, since their module names clash. Prefill and decode share steps, as with ours.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from manyroots.bench.own_process import JobArguments, answer_from_stdin, run_module
from manyroots.bench.scheduler_cases import measure_all
from manyroots.bench.scheduler_trace import (
    MADE_UP_TOKEN,
    SchedulerLimits,
    SchedulerWorkload,
    StepTimes,
    clock,
)
from manyroots.errors import ConfigError

PACKAGE = "tokenspeed-scheduler"
MODULE = "tokenspeed_scheduler"


def peer_name(folder: Path) -> str:
    """Name and version of the wheel in `folder`."""
    if (folder / MODULE).is_dir():
        for found in distributions(path=[str(folder)]):
            if found.metadata["Name"].replace("_", "-") == PACKAGE:
                return f"{PACKAGE} {found.version}"
    raise ConfigError(
        f"--peer {folder} holds no {PACKAGE}; install one with "
        f"`pip install --no-deps --target {folder} {PACKAGE}==0.1.0`."
    )


def measure_peer(folder: Path, workload: SchedulerWorkload, page_size: int) -> dict[str, Any]:
    """Every case once, in a process that sees this wheel alone."""
    job = {"workload": asdict(workload), "page_size": page_size}
    return run_module("manyroots.bench.peer_schedulers", job, extra_path=str(folder.resolve()))


class TokenSpeedScheduler:
    """`DrivenScheduler` of the wheel that this process sees."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._ts: Any = importlib.import_module(MODULE)
        self._scheduler = self._ts.Scheduler(self._config(limits))
        self._num_left: dict[str, int] = {}
        """Output tokens that each live request still gets."""
        self._started: set[str] = set()
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._num_left)

    def submit(self, prompts: list[list[int]], output_len: int) -> float:
        specs = []
        for number, prompt in enumerate(prompts, self._num_submitted):
            spec = self._ts.RequestSpec()
            spec.request_id = f"r{number:06d}"
            spec.tokens = prompt
            if hasattr(spec, "max_new_tokens"):
                spec.max_new_tokens = output_len
            self._num_left[spec.request_id] = output_len
            specs.append(spec)
        self._num_submitted += len(prompts)
        begin = clock()
        self._scheduler.submit_requests(specs)
        return clock() - begin

    def step(self) -> StepTimes:
        begin = clock()
        plan = self._scheduler.next_execution_plan()
        planned = clock()
        event = self._ts.ExecutionEvent()
        num_rows = num_arrivals = num_hit_tokens = 0
        has_prefill = False
        for forward in plan.forward:
            ids = list(forward.request_ids)
            num_extends = forward.num_extends()
            has_prefill = has_prefill or num_extends > 0
            num_rows += len(ids)
            begins = list(forward.extend_prefix_lens)[:num_extends]
            chunks = list(forward.input_lengths)[:num_extends]
            prompts = list(forward.prefill_lengths)[:num_extends]
            for name, first in zip(ids, begins, strict=False):
                if name not in self._started:
                    self._started.add(name)
                    num_arrivals += 1
                    num_hit_tokens += first
            unfinished = [
                first + chunk < prompt
                for first, chunk, prompt in zip(begins, chunks, prompts, strict=True)
            ]
            for i, name in enumerate(ids):
                if i >= num_extends or not unfinished[i]:
                    self._answer(event, name)
        answered = clock()
        self._scheduler.advance(event)
        done = clock()
        return StepTimes(
            plan_s=planned - begin,
            advance_s=done - answered,
            num_rows=num_rows,
            num_arrivals=num_arrivals,
            has_prefill=has_prefill,
            num_hit_tokens=num_hit_tokens,
        )

    def _answer(self, event: Any, name: str) -> None:
        if name not in self._num_left:
            return
        token = self._ts.ForwardEvent.ExtendResult()
        token.request_id = name
        token.tokens = [MADE_UP_TOKEN]
        event.add_event(token)
        self._num_left[name] -= 1
        if self._num_left[name] == 0:
            finish = self._ts.ForwardEvent.Finish()
            finish.request_id = name
            event.add_event(finish)
            del self._num_left[name]

    def _config(self, limits: SchedulerLimits) -> Any:
        config = self._ts.SchedulerConfig()
        config.max_scheduled_tokens = limits.budget
        config.max_batch_size = limits.batch
        config.num_device_pages = limits.num_pages
        config.num_host_pages = 0
        config.disable_l2_cache = True
        config.enable_mixed_prefill_decode = True
        if hasattr(config, "num_snapshot_pages"):
            config.num_snapshot_pages = 1
        if hasattr(self._ts, "CacheGroupConfig"):
            config.prefix_granularity = limits.page_size
            config.cache_groups = [
                self._ts.CacheGroupConfig(
                    group_id="full_attention",
                    block_granularity=limits.page_size,
                    total_pages=limits.num_pages,
                    attn_kind=self._ts.AttnKind.Full,
                )
            ]
        else:
            for name in ("page_size", "block_size"):
                if hasattr(config, name):
                    setattr(config, name, limits.page_size)
        return config


def _work(job: JobArguments) -> dict[str, Any]:
    workload = SchedulerWorkload.from_json(job["workload"])
    return measure_all(workload, job["page_size"], TokenSpeedScheduler)


if __name__ == "__main__":
    answer_from_stdin(_work)
