"""Traffic launches no kernel that the start did not launch: `python -m tests.gpu.launch_kinds`.

Needs no GPU and no interpreter. The engine is built as on a Hopper GPU, with a few layers in the
sizes of a public model and without weights. Launches compute nothing: each is named by what Triton
compiles for, the types, alignments and constants of its arguments and the compiler's options.
Takes names of shapes, `+rNN` for adapters of that rank alone. Prints what only traffic launches, a
line for each kind, and exits 1 if there is any.
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)  # It would take kernels that no compiler takes.

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction

from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.models.source import resolve_source
from manyroots.runner.device_rows import DeviceRows
from manyroots.runner.runner import ModelRunner
from tests.gpu.compiles import for_hopper, write_shape
from tests.gpu.first_runs import Traffic, run

NUM_PAGES = 20_000
RANKS = (8, 16)
NUM_ADAPTERS = 12
LARGE_BYTES = 1 << 17
Kind = tuple[str, frozenset[tuple[str, str]]]
"""A kernel's name, and all that it is compiled for: arguments and options."""


@dataclass(slots=True)
class Launches:
    """The kinds that were launched, and how often."""

    kinds: Counter[Kind] = field(default_factory=Counter)

    def launch(self, kernel: JITFunction, run: Any, *args: Any, grid: Any, **options: Any) -> None:
        """In the place of a launch."""
        options.pop("warmup", None)
        *_, binder = kernel.device_caches[0]
        _, specialization, rest = binder(*args, **options)
        module = kernel.fn.__module__.removeprefix("manyroots.kernels.")
        named = dict(zip((p.name for p in kernel.params), specialization, strict=True)) | rest
        fields = frozenset((name, str(value)) for name, value in named.items())
        self.kinds[f"{module}.{kernel.fn.__name__}", fields] += 1


def difference(kind: Kind, others: Iterable[Kind]) -> str:
    """By what it differs from the others of its kernel, at the least."""
    name, fields = kind
    near = [fields - other for kernel, other in others if kernel == name]
    least = min(near, key=len, default=fields)
    return ", ".join(f"{name} {value}" for name, value in sorted(least))


def _untouched(empty: Any) -> Any:
    """Zeros for small tensors. Large ones are pages that the system has not filled yet: zeros, too,
    that take no time."""

    def zeros(*args: Any, **options: Any) -> Tensor:
        tensor: Tensor = empty(*args, **options)
        return tensor.zero_() if tensor.nbytes < LARGE_BYTES else tensor

    return zeros


@contextmanager
def nothing_computed() -> Iterator[None]:
    """What kernels and library products would write takes no time."""
    empty, new_empty = _untouched(torch.empty), _untouched(Tensor.new_empty)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return cast(Tensor, new_empty(x, *x.shape[:-1], weight.shape[0]))

    def lookup(tokens: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, new_empty(weight, *tokens.shape, weight.shape[1]))

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", _untouched(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", new_empty),
        mock.patch.object(F, "linear", product),
        mock.patch.object(F, "embedding", lookup),
        mock.patch.object(DeviceRows, "tables_for", lambda rows, *_: rows.page_tables),
    ):
        yield


def compare(
    name: str, folder: Path, *, num_requests: int = 256, seed: int = 0, **more: Any
) -> tuple[Counter[Kind], Counter[Kind]]:
    """The kinds that the start of an engine launches, and those that only its traffic does."""
    config, *options = name.split("+")
    home = write_shape(config, folder)
    own_ranks = tuple(int(option[1:]) for option in options if option[0] == "r")
    ranks = own_ranks or RANKS
    targets = targets_of(resolve_source(engine_settings({"model": str(home)}).model))
    modules: list[str] = []
    for rank in ranks:
        own = folder / f"rank{rank}"
        own.mkdir()
        paths = write_adapters(targets, own, NUM_ADAPTERS // len(ranks), rank, experts=True)
        modules += [f"a{len(modules) + at}={path}" for at, path in enumerate(paths)]
    settings = {
        "model": str(home),
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "bfloat16",
        "block_size": 128 if "deepseek-v4" in config else 16,  # a page holds groups whole
        "max_model_len": 2048,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": NUM_PAGES,
        "enable_lora": True,
        "lora_modules": tuple(modules),
        "max_lora_rank": max(ranks),
        **more,
    }
    launches = Launches()
    with for_hopper(launches), nothing_computed():
        engine = build_engine(engine_settings(settings))
        loop, runner = engine.loop, cast(ModelRunner, engine.loop._runner)
        try:
            runner._in_warmup(lambda warmup: warmup.warm_up(8192, has_adapters=True))
            at_start, launches.kinds = launches.kinds, Counter()
            with runner._decoder.one_of_each_kind():
                print(f"  {runner._decoder._num_run} of {len(runner._decoder.layers)} layers")
            traffic = Traffic(max_prompt=1500, num_requests=num_requests, num_adapters=NUM_ADAPTERS)
            for kind, submits in traffic.kinds():
                began = time.monotonic()
                errors = run(loop, submits)
                if errors:
                    raise AssertionError(f"{kind}: {errors[0]}")
                new = launches.kinds.keys() - at_start.keys()
                print(f"  {kind}: {time.monotonic() - began:.1f} s, {len(new)}", flush=True)
        finally:
            loop.close()
    only = {kind: count for kind, count in launches.kinds.items() if kind not in at_start}
    return at_start, Counter(only)


def main(models: list[str]) -> int:
    is_good = True
    for name in models or ["qwen3-8b"]:
        with tempfile.TemporaryDirectory() as folder:
            at_start, only = compare(name, Path(folder))
        print(f"{name}: {len(at_start)} kinds of the start, {len(only)} only of traffic")
        for kind, count in sorted(only.items(), key=lambda item: item[0][0]):
            print(f"  {count} x {kind[0]}: {difference(kind, at_start)}")
        is_good = is_good and not only
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
