"""Where the time of a cold adapter goes: `python -m tests.measures.adapter_reads [COUNT] [MODEL]`.

Writes adapters of rank 16 with the shapes of a public model, reads them as the engine does, alone
and side by side, and prints JSON: seconds of each read, processor seconds of each of its stages,
and how long another Python thread had to wait meanwhile. That thread stands for the one that
launches steps. Files are in the page cache, and memory for them is ready. Needs no GPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from manyroots.bench.machine import describe_machine
from manyroots.bench.model_configs import write_config
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.config import ModelSettings
from manyroots.engine.adapter_directory import NUM_READS
from manyroots.engine.adapter_reads import Reads
from manyroots.lora.files import digest
from manyroots.lora.files.opened import AdapterFile
from manyroots.lora.targets import Targets
from manyroots.models.source import resolve_source
from manyroots.store import adapter_bytes
from manyroots.store.adapter_files import foresee, read_folder
from manyroots.store.adapter_layouts import Layouts

RANK = 16
NUM_REPEATS = 3
TICK_S = 2e-4


class Stages:
    """Processor seconds by stage, added over threads."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begin_s = time.thread_time()
            try:
                return call(*args)
            finally:
                took_s = time.thread_time() - begin_s
                with self._lock:
                    self.seconds[stage] += took_s

        return run

    def _hash(self, *data: Any) -> mock.Mock:
        hashed = hashlib.sha256(*data)
        return mock.Mock(update=self.timed("hash", hashed.update), digest=hashed.digest)

    @contextmanager
    def watching(self) -> Iterator[None]:
        hashes = mock.Mock(sha256=self._hash)
        taken = self.timed("check and move", adapter_bytes.ArrivingBytes.take)
        with ExitStack() as patches:
            for owner, name, call in (
                (AdapterFile, "read_into", self.timed("read", AdapterFile.read_into)),
                (digest, "hashlib", hashes),
                (adapter_bytes, "are_finite", self.timed("check", adapter_bytes.are_finite)),
                (adapter_bytes.ArrivingBytes, "take", taken),
                (Layouts, "of", self.timed("describe", Layouts.of)),
            ):
                patches.enter_context(mock.patch.object(owner, name, call))
            yield

    def report(self) -> dict[str, float]:
        seconds = dict(self.seconds)
        seconds["move"] = seconds.pop("check and move") - seconds["check"]
        return {stage: round(took, 5) for stage, took in sorted(seconds.items())}


class OtherThread:
    """Wakes again and again, and notes how long after each wake-up Python let it run."""

    def __init__(self) -> None:
        self._waits_s: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> OtherThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            begin_s = time.monotonic()
            time.sleep(TICK_S)
            self._waits_s.append(time.monotonic() - begin_s - TICK_S)

    def report(self) -> dict[str, float]:
        waits = np.array(self._waits_s) * 1000
        return {
            "p50_ms": round(float(np.median(waits)), 3),
            "p99_ms": round(float(np.quantile(waits, 0.99)), 3),
            "longest_ms": round(float(waits.max()), 3),
        }


class Adapters:
    """Folders, what is known of them before their first use, and memory for one of each."""

    def __init__(self, folders: Sequence[Path], targets: Targets) -> None:
        self.folders = folders
        self._layouts = Layouts(targets, max_rank=RANK, dtype=torch.bfloat16, vocab_size=1 << 20)
        foresee([str(folders[0])], self._layouts)
        self.num_bytes = (folders[0] / "adapter_model.safetensors").stat().st_size
        self._memory = [torch.ones(self.num_bytes, dtype=torch.uint8) for _ in folders]

    def read(self, number: int) -> None:
        memory = self._memory[number]
        read_folder(self.folders[number], self._layouts, allocate=lambda size: memory[:size])

    def read_together(self) -> list[float]:
        """Seconds after which each was read, first to last."""
        reads: Reads[None] = Reads(NUM_READS)
        for number in range(len(self.folders)):
            reads.begin(number, partial(self.read, number))
        seconds: list[float] = []
        while reads.num_under_way:
            reads.wait()
            for finished in reads.take():
                if finished.error is not None:
                    raise finished.error
                seconds.append(round(finished.seconds, 4))
        reads.close()
        return seconds


def measure(adapters: Adapters) -> dict[str, Any]:
    for number in range(len(adapters.folders)):
        adapters.read(number)  # into the page cache
    with OtherThread() as idle:
        time.sleep(1)
    alone = []
    for _ in range(NUM_REPEATS):
        begin_s = time.monotonic()
        adapters.read(0)
        alone.append(round(time.monotonic() - begin_s, 4))
    stages = Stages()
    with stages.watching():
        adapters.read(0)
    with OtherThread() as other:
        together = [adapters.read_together() for _ in range(NUM_REPEATS)]
    return {
        "adapter_bytes": adapters.num_bytes,
        "alone_s": alone,
        "alone_processor_s": stages.report(),
        "together_s": together,
        "other_thread_idle": idle.report(),
        "other_thread_reading": other.report(),
    }


def main(words: list[str]) -> int:
    count = int(words[0]) if words else 3
    model_config = words[1] if len(words) > 1 else "qwen3-8b"
    with tempfile.TemporaryDirectory() as home:
        source = resolve_source(
            ModelSettings(model=str(write_config(model_config, Path(home), None)))
        )
        targets = targets_of(source)
        folders = write_adapters(targets, Path(home), count, RANK)
        found = measure(Adapters(folders, targets))
    print(
        json.dumps({"model": model_config, "count": count, "machine": describe_machine(), **found})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
