"""`manyroots bench kernels`: one kernel at a time on a model's shape, as rates.

What a whole step takes is `bench decode`'s and `bench traffic`'s matter; this says which kernel is
far from what its bytes or operations allow. Each is compared with its reference in the same run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from manyroots.bench.kernel_attention import Sequences, measure_decodes, measure_prompts
from manyroots.bench.kernel_latent import measure_latent_decodes, measure_latent_prompts
from manyroots.bench.kernel_products import Products, shapes_of
from manyroots.bench.kernel_readers import Readers
from manyroots.bench.machine import describe_machine
from manyroots.bench.model_configs import write_config
from manyroots.config import engine_settings
from manyroots.errors import ConfigError
from manyroots.kernels.choice import Kernels
from manyroots.layers.spec import AttentionSpec, LatentSpec
from manyroots.models.kernel_set import kernel_set
from manyroots.models.load import describe
from manyroots.models.source import resolve_source
from manyroots.models.spec import ModelSpec

Mixer = TypeVar("Mixer")
PARTS = ("products", "readers", "decodes", "prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWorkload:
    """What is run."""

    model_config: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    """Of products and readers."""
    decodes: tuple[str, ...]
    prompts: tuple[str, ...]
    """As `Sequences` reads them."""
    dtype: str
    is_fp8: bool
    num_adapters: int
    adapter_rank: int
    repeats: int


@torch.inference_mode()
def run_kernels(
    workload: KernelWorkload,
    device: torch.device,
    choose: Callable[[ModelSpec, torch.device], Kernels] = kernel_set,
) -> dict[str, Any]:
    """Measure every case; prints a table as it goes and gives the report. `choose`: a set of
    kernels, where not the device's own."""
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as folder:
        model = str(write_config(workload.model_config, Path(folder)))
        settings = engine_settings({"model": model, "load_format": "dummy"}).model
        spec = describe(resolve_source(settings))
    kernels = choose(spec, device)
    if workload.num_adapters and not kernels.ask_nothing:
        raise ConfigError(
            "--adapters measures the kernels of a GPU, and there is none; leave it out (bench "
            "offline --adapters measures a CPU's)."
        )
    report: dict[str, Any] = {
        "bench": "kernels",
        "workload": asdict(workload),
        "machine": describe_machine(),
        "cases": list(_cases(workload, spec, kernels, device)),
    }
    wrong = [case for case in report["cases"] if not case.get("agrees")]
    report["all_agree"] = not wrong
    if wrong:
        print(f"{len(wrong)} kernels failed or differ", file=sys.stderr, flush=True)
    return report


def _cases(
    workload: KernelWorkload, spec: ModelSpec, kernels: Kernels, device: torch.device
) -> Iterator[dict[str, Any]]:
    dtype: torch.dtype = getattr(torch, workload.dtype)
    products = Products(
        kernels=kernels,
        dtype=dtype,
        device=device,
        is_fp8=workload.is_fp8,
        num_adapters=workload.num_adapters,
        adapter_rank=workload.adapter_rank,
        repeats=workload.repeats,
    )
    shapes = shapes_of(spec)
    if "products" in workload.parts:
        yield from products.measure(shapes, workload.rows)
    if "readers" in workload.parts:
        readers = Readers.of(products, spec)
        if readers is not None:
            yield from readers.measure(shapes, workload.rows)
    for part, measure, measure_latents in (
        ("decodes", measure_decodes, measure_latent_decodes),
        ("prompts", measure_prompts, measure_latent_prompts),
    ):
        if part not in workload.parts:
            continue
        for text in getattr(workload, part):
            rest = (Sequences.read(text), kernels, dtype, device, workload.repeats)
            attention, latents = _first(spec, AttentionSpec), _first(spec, LatentSpec)
            if attention is not None:
                yield measure(attention, *rest)
            if latents is not None:
                yield measure_latents(latents, *rest)


def _first(spec: ModelSpec, kind: type[Mixer]) -> Mixer | None:
    """The first of a model's mixers of this kind."""
    mixers = (mixer for layer in spec.layers for mixer in layer.mixers)
    return next((mixer for mixer in mixers if isinstance(mixer, kind)), None)
