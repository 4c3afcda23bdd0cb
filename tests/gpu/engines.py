"""Engines on the GPU and on the CPU, given the same requests."""

from __future__ import annotations

import enum
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

from manyroots.config import EngineSettings, engine_settings
from manyroots.engine import adapter_runtime, worker
from manyroots.engine.build import build_engine
from manyroots.engine.loop import EngineLoop
from manyroots.kernels.choice import Kernels, reference_kernels
from manyroots.messages import FinishReason, Output, Submit
from manyroots.models import kernel_set
from manyroots.runner.runner import ModelRunner
from manyroots.store.adapter_pool import AdapterPool
from tests.gpu.models import MAX_RANK, NAMES, modules_of

MAX_NUM_SEQS = {"float32": 16, "bfloat16": 80}
"""Decode steps of up to 16, up to 64 and more rows take different kernels. In float32, where dots
are made of single multiplications, those for 17 to 64 rows take minutes to compile."""

MAX_OWN_ROWS = 64
"""Larger products are the library's on a GPU."""

Outputs = dict[int, list[Output]]


class Side(enum.Enum):
    """What computes."""

    CPU = "cpu"
    GPU = "gpu"
    REFERENCES = "references"
    """The GPU's runner on a CPU, with references in its kernels' place and without graphs: to try
    the comparison itself where there is no GPU."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Where a model of `make_model` is, and in which arithmetic it is computed."""

    folder: Path
    dtype: str
    side: Side

    def settings(self, **more: Any) -> EngineSettings:
        return engine_settings(
            {
                "model": str(self.folder / "base"),
                "device": "cuda" if self.side is Side.GPU else "cpu",
                "dtype": self.dtype,
                "max_num_seqs": MAX_NUM_SEQS[self.dtype],
                # More than one block of queries, so that a chunk is cut as long prompts are.
                "max_num_batched_tokens": 192,
                "num_gpu_blocks_override": 512,
                "enable_lora": True,
                "max_loras": len(NAMES),
                "max_lora_rank": MAX_RANK,
                "lora_modules": modules_of(self.folder),
                **more,
            }
        )

    def loop(self, **more: Any) -> EngineLoop:
        """An engine's loop, to be closed."""
        with _as_on_a_gpu() if self.side is Side.REFERENCES else nullcontext():
            return build_engine(self.settings(**more)).loop

    def outputs(self, batches: list[list[Submit]], **more: Any) -> list[Outputs]:
        """What an engine gives for each batch, one after the other."""
        loop = self.loop(**more)
        try:
            return [run(loop, batch) for batch in batches]
        finally:
            loop.close()
            del loop
            gc.collect()


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Engines that are built in here run as on a GPU, but for graphs, wherever they compute."""
    with (
        mock.patch.object(kernel_set, "kernels_for", return_value=_references()),
        mock.patch.object(worker, "ModelRunner", partial(ModelRunner, fixed_shapes=True)),
        mock.patch.object(
            adapter_runtime, "AdapterPool", partial(AdapterPool, is_transposed=False)
        ),
    ):
        yield


def _references() -> Kernels:
    """Those in the GPU's place, which has products of its own for few rows alone."""
    references = reference_kernels()
    few = lambda num_rows, weight, **_: num_rows <= MAX_OWN_ROWS  # noqa: E731
    gemm = SimpleNamespace(**{**vars(references.gemm), "is_for": few})
    return replace(references, gemm=cast(ModuleType, gemm))


def run(loop: EngineLoop, batch: list[Submit]) -> Outputs:
    outputs: Outputs = {int(request.request_id): [] for request in batch}
    for request in batch:
        loop.handle(request)
    while loop.has_work or loop.is_reading:
        if loop.is_reading and not loop.has_work:
            loop.wait_for_read()
        for output in loop.step():
            if output.finish_reason is FinishReason.ERROR:
                # No AssertionError: what fails was not compared, so it finds no planted fault.
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            outputs[int(output.request_id)].append(output)
    return outputs


def tokens_of(outputs: Outputs) -> dict[int, list[int]]:
    return {number: [t for o in news for t in o.tokens] for number, news in outputs.items()}
