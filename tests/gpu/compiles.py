"""Every kernel that a server launches is compiled for a Hopper GPU, which need not be there:
`python -m tests.gpu.compiles [MODEL ...]`.

Takes shapes of models (names of `--model-config` or of `odd_sizes`, `+fp8` for rounded weights,
`+rNN` for adapters of that rank); gives a line for each kernel: how many forms of it there are, and
the most registers, spilled bytes and shared memory of one. Exits 1 if one can't be compiled, takes
more memory than a multiprocessor has, or would be launched on a grid that a GPU refuses.

The engine is built as on a GPU, with a few layers in their real sizes, and rehearses the steps that
it would capture at its start. Launches become compilations; nothing is computed, so only what can
be said without results is shown here. Where results count, `tests.gpu.check` is what to run.
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)  # It would take kernels that no compiler takes.

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from manyroots.bench.model_configs import write_config
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.config import engine_settings
from manyroots.engine import adapter_runtime, worker
from manyroots.engine.build import build_engine
from manyroots.kernels import choice, launch
from manyroots.kernels.attention import triton_hopper as hopper_attention
from manyroots.kernels.compressed import triton_attend as group_attention
from manyroots.kernels.compressed import triton_hopper as hopper_groups
from manyroots.kernels.gemm import triton_early, triton_hopper
from manyroots.kernels.latent import triton_hopper as hopper_latents
from manyroots.kernels.latent import triton_hopper_prompt as hopper_latent_prompts
from manyroots.models import kernel_set, load
from manyroots.models.source import resolve_source
from manyroots.runner.graphs import GraphKey, Graphs
from manyroots.runner.mixed import MixedShape
from manyroots.runner.runner import ModelRunner
from manyroots.store.adapter_pool import AdapterPool
from tests.gpu import odd_sizes
from tests.gpu.hopper import SHARED_BYTES, compile_for_hopper
from tests.unit.models.tiny import save_tiny

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
NUM_MULTIPROCESSORS = 132
NUM_LAYERS = 4
"""One of each kind, of the models that are named here."""
MOST_EXPERTS = 64
"""With all of DeepSeek's the weights would not fit into most machines' memory."""
NUM_ADAPTERS, MAX_LEN = 2, 4096
DEFAULT_RANK = 16
MODELS = (
    "qwen3-8b", "qwen3-8b+r64", "qwen3-8b+fp8", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-9b",
    "deepseek-v2-lite", "deepseek-v4-flash-6-layers",
)  # fmt: skip


@dataclass(slots=True)
class Forms:
    """All that one kernel was compiled to."""

    code: dict[str, Any] = field(default_factory=dict)
    """By the hash of its source, types and constants."""

    def line(self) -> dict[str, int]:
        used = [_resources(form.asm["cubin"]) for form in self.code.values()]
        return {
            "forms": len(used),
            "registers": max(one["REG"] for one in used),
            "spilled": max(one["STACK"] + one["LOCAL"] for one in used),
            "shared": max(form.metadata.shared for form in self.code.values()),
        }


@dataclass(slots=True)
class Compiled:
    """What was launched, by name."""

    kernels: dict[str, Forms] = field(default_factory=dict)
    num_launches: int = 0

    def launch(self, kernel: JITFunction, run: Any, *args: Any, grid: Any, **options: Any) -> None:
        """In the place of a launch."""
        options["warmup"] = True
        form = run(kernel, *args, grid=grid, **options)
        self.num_launches += 1
        module = kernel.fn.__module__.removeprefix("manyroots.kernels.")
        name = f"{module}.{kernel.fn.__name__}"
        if form.metadata.shared > SHARED_BYTES:
            raise AssertionError(f"{name} takes {form.metadata.shared} bytes of shared memory")
        sizes = grid if isinstance(grid, tuple) else ()
        for size, most in zip(sizes, MOST_PROGRAMS, strict=False):
            if not 0 < size <= most:
                raise AssertionError(f"{name} would be launched on a grid of {grid}")
        self.kernels.setdefault(name, Forms()).code[form.hash] = form


def _resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library's, not computed."""
    return x.new_zeros(*x.shape[:-1], weight.shape[0])


def _batched_product(x: Tensor, weights: Tensor, *, out: Tensor) -> Tensor:
    return out.zero_()


def _scaled_product(
    x: Tensor, turned: Tensor, *_: Any, out_dtype: torch.dtype, **__: Any
) -> Tensor:
    return x.new_zeros(x.shape[0], turned.shape[1], dtype=out_dtype)


def _lookup(tokens: Tensor, weight: Tensor) -> Tensor:
    """Zeros: the tokens here were never sampled."""
    return weight.new_zeros(*tokens.shape, weight.shape[1])


class Launcher(Protocol):
    """What becomes of launches."""

    def launch(
        self, kernel: JITFunction, run: Any, *args: Any, grid: Any, **options: Any
    ) -> None: ...


@contextmanager
def for_hopper(launcher: Launcher) -> Iterator[None]:
    """Engines built in here take a Hopper GPU's kernels, and give what they would launch to
    `launcher`. The process can launch nothing afterwards."""
    run = JITFunction.run
    yes = lambda *_: True  # noqa: E731

    def launched(self: JITFunction, *args: Any, **options: Any) -> None:
        launcher.launch(self, run, *args, **options)

    compile_for_hopper()
    with ExitStack() as patches:
        for place, name, new in (
            (JITFunction, "run", launched),
            (launch, "is_dependent", yes),
            (hopper_attention, "is_hopper", yes),
            (hopper_attention, "_num_multiprocessors", lambda _: NUM_MULTIPROCESSORS),
            (hopper_groups, "is_hopper", yes),
            (hopper_groups, "_num_multiprocessors", lambda _: NUM_MULTIPROCESSORS),
            (group_attention, "has_shared_memory", yes),
            (hopper_latents, "is_hopper", yes),
            (hopper_latents, "_num_multiprocessors", lambda _: NUM_MULTIPROCESSORS),
            (hopper_latent_prompts, "is_hopper", yes),
            (hopper_latent_prompts, "_num_multiprocessors", lambda _: NUM_MULTIPROCESSORS),
            (triton_hopper, "is_hopper", yes),
            (triton_early, "is_hopper", yes),
            (kernel_set, "kernels_for", lambda _: choice.kernel_set_of("triton")),
            (load, "fill", lambda *_: None),
            (F, "linear", _product),
            (F, "embedding", _lookup),
            (torch, "_scaled_mm", _scaled_product),
            (torch, "bmm", _batched_product),
            (worker, "ModelRunner", partial(ModelRunner, fixed_shapes=True)),
            (adapter_runtime, "AdapterPool", partial(AdapterPool, is_transposed=False)),
            (Graphs, "capture_all", _all_steps),
        ):
            patches.enter_context(mock.patch.object(place, name, new))
        yield


def _all_steps(graphs: Graphs, mixed: list[MixedShape]) -> None:
    """In the place of captures: every kind of step once, one launch at a time."""
    keys = [GraphKey(shape.num_tokens, k, mixed=shape) for shape in mixed for k in graphs._kinds]
    keys += [GraphKey(size, kind) for size in graphs._sizes for kind in graphs._kinds]
    single = [key for key in keys if key.mixed is None]
    keys += [key._replace(shares=True) for key in single]
    keys += [key._replace(in_runs=True) for key in single]
    for key in keys:
        graphs.run(graphs._blank(key), mixed=key.mixed)


def write_shape(name: str, folder: Path) -> Path:
    """The folder of a model without weights, with a few layers."""
    if name in odd_sizes.MODELS:
        kind, sizes = odd_sizes.MODELS[name]
        save_tiny(folder, kind, **sizes | {"max_position_embeddings": MAX_LEN})
        return folder
    home = write_config(name, folder)
    described = json.loads((home / "config.json").read_text())
    described["num_hidden_layers"] = NUM_LAYERS
    if described.get("n_routed_experts", 0) > MOST_EXPERTS:
        described["n_routed_experts"] = MOST_EXPERTS
    (home / "config.json").write_text(json.dumps(described))
    return home


def compile_model(name: str, folder: Path) -> Compiled:
    """All kernels of a server of this model, with adapters and without."""
    config, *options = name.split("+")
    rank = next((int(o[1:]) for o in options if o[0] == "r"), DEFAULT_RANK)
    home = write_shape(config, folder)
    adapters = write_adapters(
        targets_of(resolve_source(engine_settings({"model": str(home)}).model)), folder,
        NUM_ADAPTERS, rank, experts=True,
    )  # fmt: skip
    settings = {
        "model": str(home),
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "bfloat16",
        "quantization": "fp8" if "fp8" in options else "auto",
        "max_model_len": MAX_LEN,
        "block_size": 128 if "deepseek-v4" in config else 16,  # a page holds groups whole
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": 512,
        "enable_lora": True,
        "lora_modules": tuple(f"a{i}={path}" for i, path in enumerate(adapters)),
        "max_loras": NUM_ADAPTERS,
        "max_lora_rank": rank,
    }
    compiled = Compiled()
    with for_hopper(compiled):
        engine = build_engine(engine_settings(settings))
        try:
            runner = cast(ModelRunner, engine.loop._runner)
            runner._in_warmup(lambda warmup: warmup.warm_up(8192, has_adapters=True))
        finally:
            engine.loop.close()
    return compiled


def main(models: list[str]) -> int:
    failed = []
    for model in models or MODELS:
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                compiled = compile_model(model, Path(folder))
        except Exception as error:
            print(f"{model}: {type(error).__name__}: {error}", flush=True)
            failed.append(model)
            continue
        took = time.monotonic() - began
        print(f"{model}: {compiled.num_launches} launches compile, {took:.0f} s", flush=True)
        for name, forms in sorted(compiled.kernels.items()):
            print(f"  {name:45}", "  ".join(f"{k} {v}" for k, v in forms.line().items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
