"""Kernels and graphs that the start did not make are named by the step that waited for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyroots.observe.metrics import Metrics
from manyroots.runner.first_runs import FirstRuns
from manyroots.step import FirstRun
from tests.helpers.adapter_engine import AdapterEngine, TinyWorld

ROOT = Path(__file__).parents[3]

SCRIPT = """
import torch
import triton

from manyroots.runner.first_runs import FirstRuns
from tests.gpu.hopper import compile_for_hopper


@triton.jit
def _kernel(x, count):
    pass


compile_for_hopper()
x = torch.zeros(16)
_kernel.warmup(x, 16, grid=(1,))
runs = FirstRuns()
runs.begin()
_kernel.warmup(x, 32, grid=(1,))
assert runs.take() == (), "the same kernel"
_kernel.warmup(x.half(), 32, grid=(1,))
print([(run.kind, run.name) for run in runs.take()])
"""


def test_s04_a_kernel_that_is_compiled_after_the_start_is_named(tmp_path: Path) -> None:
    """S04: a kernel of other types than those before; the compiler needs no GPU."""
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.stdout.strip() == "[('kernel', '__main__._kernel')]", done.stderr


def test_s04_nothing_is_counted_before_the_engine_is_ready() -> None:
    """S04: the start compiles and captures nearly everything."""
    runs = FirstRuns()
    runs.note("graph", "of the start")
    assert runs.take() == ()
    runs.begin()
    runs.note("graph", "of a step")
    assert runs.take() == (FirstRun("graph", "of a step"),)
    assert runs.take() == ()


def test_s04_metrics_count_what_steps_had_to_wait_for(tmp_path: Path) -> None:
    """S04: through a real engine, which is told of a capture between two steps."""
    engine = AdapterEngine(TinyWorld(tmp_path, {}))
    metrics = Metrics("tiny", engine.loop.stats)
    runs = engine.model_runner._first_runs
    try:
        engine.model_runner.warm_up(64)
        assert engine.answer(0, [5, 2, 7, 11])
        assert _first_runs(metrics) == {"kernel": 0, "graph": 0}
        runs.note("graph", "of a kind that was rare")
        assert engine.answer(1, [5, 2, 7, 12])
        assert _first_runs(metrics) == {"kernel": 0, "graph": 1}
    finally:
        engine.close()


def _first_runs(metrics: Metrics) -> dict[str, int]:
    return {
        sample.labels["kind"]: int(sample.value)
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "manyroots:first_runs_total"
    }
