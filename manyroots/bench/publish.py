"""`manyroots bench publish`: how long new weights in memory take to their first token.

An engine decodes streams of the base model all the time. Again and again an adapter's tensors are
handed over under one name, and a prompt of that name is sent as soon as it is published. Prints the
time from the tensors to the prompt's first token, and what a step of the streams takes meanwhile.
Engine level, below text and HTTP.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from manyroots.bench.machine import describe_machine
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.config import engine_settings
from manyroots.engine.adapter_tensors import memory_adapter
from manyroots.engine.build import build_engine
from manyroots.engine.loop import EngineLoop
from manyroots.errors import ConfigError
from manyroots.ids import AdapterName, RequestId, Tier
from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE
from manyroots.messages import Abort, PublishLora, Submit
from manyroots.models.source import resolve_source
from manyroots.sampling import SamplingParams

_NAME = AdapterName("policy")


@dataclass(frozen=True, slots=True)
class PublishWorkload:
    """What is asked of the engine."""

    revisions: int
    rank: int
    streams: int
    stream_prompt_len: int
    prompt_len: int
    pinned: bool = False
    """Whether each revision is loaded to the device when it is published."""
    seed: int = 0


class _Bench:
    """One engine and its streams."""

    def __init__(self, loop: EngineLoop, workload: PublishWorkload, vocab_size: int) -> None:
        self._loop = loop
        self._workload = workload
        self._vocab_size = vocab_size
        self._ids = itertools.count(1)
        self._rng = np.random.default_rng(workload.seed)
        self.step_s: list[float] = []
        self.copy_s: list[float] = []
        """Of tensors into the form of an adapter's files."""
        self.load_s: dict[Tier, list[float]] = {}
        """Of adapters to each tier."""

    def submit(self, adapter: AdapterName | None, prompt_len: int, count: int) -> RequestId:
        number = RequestId(next(self._ids))
        prompt = self._rng.integers(1, self._vocab_size, prompt_len).tolist()
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        self._loop.handle(Submit(number, prompt, None, sampling, 0, (), adapter))
        return number

    def step(self) -> set[RequestId]:
        """Requests that got tokens."""
        begin = time.perf_counter()
        outputs = list(self._loop.step())
        self.step_s.append(time.perf_counter() - begin)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return {output.request_id for output in outputs if output.tokens}

    def publish(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        """Until requests of the name are computed by these."""
        op_id = next(self._ids)
        begin = time.perf_counter()
        adapter = memory_adapter(tensors, config)
        self.copy_s.append(time.perf_counter() - begin)
        self._loop.handle(PublishLora(op_id, _NAME, adapter, self._workload.pinned))
        while True:
            for reply in self._loop.take_replies():
                if reply.op_id == op_id:
                    if reply.error is not None:
                        raise RuntimeError(reply.error)
                    return
            self.step()

    def note_loads(self) -> None:
        for load in self._loop.take_loads():
            self.load_s.setdefault(load.target, []).append(load.seconds)

    @contextmanager
    def streaming(self, max_model_len: int) -> Iterator[None]:
        given = self._workload
        room = max_model_len - given.stream_prompt_len
        numbers = {self.submit(None, given.stream_prompt_len, room) for _ in range(given.streams)}
        seen: set[RequestId] = set()
        while seen < numbers:
            seen |= self.step() & numbers
        try:
            yield
        finally:
            self._loop.handle(Abort(list(numbers)))
            while self._loop.has_work:
                self._loop.step()


def run_publish(workload: PublishWorkload, engine: dict[str, Any]) -> dict[str, Any]:
    """Measure; prints what it found and gives the report."""
    settings = engine_settings(
        engine | {"enable_lora": True, "max_lora_rank": max(16, workload.rank)}
    )
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as folder:
        targets = targets_of(resolve_source(settings.model))
        [home] = write_adapters(targets, Path(folder), 1, workload.rank)
        tensors = load_file(home / WEIGHTS_FILE)
        config = json.loads((home / CONFIG_FILE).read_text())
    built = build_engine(settings)
    info = built.info
    if workload.streams >= info.max_num_seqs:
        raise ConfigError(
            f"--streams is {workload.streams}; --max-num-seqs has {info.max_num_seqs}."
        )
    bench = _Bench(built.loop, workload, info.vocab_size)
    first_token_s: list[float] = []
    published_s: list[float] = []
    changed = next(iter(tensors))
    try:
        with bench.streaming(info.max_model_len):
            for _ in range(64):
                bench.step()
            alone_s = bench.step_s[-48:]
            bench.step_s = []
            for number in range(-2, workload.revisions):
                tensors[changed] = torch.roll(tensors[changed].flatten(), 1).view_as(
                    tensors[changed]
                )
                begin = time.perf_counter()
                bench.publish(tensors, config)
                ready = time.perf_counter()
                asked = bench.submit(_NAME, workload.prompt_len, 1)
                while asked not in bench.step():
                    pass
                bench.note_loads()
                if number >= 0:  # the first two compile and allocate
                    first_token_s.append(time.perf_counter() - begin)
                    published_s.append(ready - begin)
    finally:
        built.loop.close()
    size = sum(tensor.nbytes for tensor in tensors.values())
    report = {
        "bench": "publish",
        "workload": asdict(workload),
        "engine": engine,
        "machine": describe_machine(),
        "adapter_bytes": size,
        "tensors_to_first_token_ms": _told(first_token_s),
        "tensors_to_published_ms": _told(published_s),
        "copy_of_tensors_ms": _told(bench.copy_s[2:]),
        "check_and_hash_ms": _told(bench.load_s[Tier.HOST][2:]),
        "to_the_device_ms": _told(bench.load_s[Tier.DEVICE][2:]),
        "stream_step_ms": _told(alone_s),
        "stream_step_while_publishing_ms": _told(bench.step_s),
    }
    print(
        f"adapter of rank {workload.rank}: {size / 1e6:.1f} MB, beside {workload.streams} streams"
    )
    for name, told in report.items():
        if isinstance(told, dict) and "p50" in told:
            print(
                f"{name:34} p50 {told['p50']:8.2f}  p90 {told['p90']:8.2f}  max {told['max']:8.2f}"
            )
    return report


def _told(seconds: list[float]) -> dict[str, float]:
    found = np.array(seconds) * 1e3
    return {
        "p50": float(np.percentile(found, 50)),
        "p90": float(np.percentile(found, 90)),
        "max": float(found.max()),
    }
