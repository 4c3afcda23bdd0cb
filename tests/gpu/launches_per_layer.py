"""The kernels of a layer of experts in a decode step: `python -m tests.gpu.launches_per_layer`.

Needs no GPU and no interpreter: see `launch_kinds`. Takes names of shapes; prints the launches from
one layer's attention to the next one's, without adapters and with.
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)  # It would take kernels that no compiler takes.

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from triton.runtime.jit import JITFunction

from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.models.source import resolve_source
from manyroots.runner.graphs import GraphKey
from manyroots.runner.runner import ModelRunner
from tests.gpu.compiles import for_hopper, write_shape
from tests.gpu.launch_kinds import nothing_computed

RANK, NUM_ADAPTERS = 16, 8


@dataclass(slots=True)
class Names:
    """What was launched, in order."""

    names: list[str] = field(default_factory=list)

    def launch(self, kernel: JITFunction, run: Any, *args: Any, grid: Any, **options: Any) -> None:
        module = kernel.fn.__module__.removeprefix("manyroots.kernels.")
        self.names.append(f"{module}.{kernel.fn.__name__}")


def last_layer(name: str, num_rows: int) -> tuple[list[str], list[str]]:
    """The launches of a step with so many rows, from the last layer but one to the last: without
    adapters, and with."""
    launches, found = Names(), []
    with tempfile.TemporaryDirectory() as folder:
        home = write_shape(name, Path(folder))
        targets = targets_of(resolve_source(engine_settings({"model": str(home)}).model))
        paths = write_adapters(targets, Path(folder), 1, RANK, experts=True)
        settings = {
            "model": str(home), "load_format": "dummy", "device": "cpu", "dtype": "bfloat16",
            "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048,
            "num_gpu_blocks_override": 2000, "enable_lora": True, "max_lora_rank": RANK,
            "max_loras": NUM_ADAPTERS, "lora_modules": (f"a={paths[0]}",),
        }  # fmt: skip
        with for_hopper(launches), nothing_computed():
            loop = build_engine(engine_settings(settings)).loop
            try:
                graphs = cast(ModelRunner, loop._runner)._graphs
                assert graphs is not None
                for has_adapters in (False, True):
                    launches.names.clear()
                    graphs.run(graphs._blank(GraphKey(num_rows, has_adapters)))
                    found.append(_between_attention(launches.names))
            finally:
                loop.close()
    return found[0], found[1]


def _between_attention(names: list[str]) -> list[str]:
    """From one attention to the next: of the last two."""
    places = [at for at, name in enumerate(names) if name in ATTENTION]
    return names[places[-2] : places[-1]]


ATTENTION = (
    "latent.triton_hopper._decode",
    "latent.triton_hopper_pairs._decode",
    "attention.triton._decode",
)


def main(models: list[str]) -> int:
    for name in models or ["deepseek-v2-lite"]:
        for num_rows in (8, 64):
            for kind, names in zip(("base", "adapters"), last_layer(name, num_rows), strict=True):
                print(f"{name}, {num_rows} rows, {kind}: {len(names)}")
                print(*(f"  {one}" for one in names), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
