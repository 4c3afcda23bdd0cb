"""Adapters with random weights, as files that any server could load.

All have the same shapes and the same bytes but for a few, so that writing many large ones is a
copy of a file each, several at a time; their contents, and so their digests and namespaces, still
differ.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from manyroots.bench.words import PROJECTIONS
from manyroots.lora.files.folder import WEIGHTS_FILE
from manyroots.lora.targets import Target, TargetKind, Targets
from manyroots.models.decoder import Decoder
from manyroots.models.load import describe
from manyroots.models.source import ModelSource


def targets_of(source: ModelSource) -> Targets:
    """What adapters may change in a model, without loading its weights."""
    spec = describe(source)
    meta = torch.device("meta")
    model = Decoder(spec, dtype=torch.bfloat16, device=meta)
    return model.adapter_targets()


def chosen(
    targets: Targets, projections: tuple[str, ...] = PROJECTIONS, *, experts: bool = True
) -> Targets:
    """Those with these names; `experts`: those of experts, too."""
    return {
        name: target
        for name, target in targets.items()
        if name.rsplit(".", 1)[-1] in projections
        and (experts or target.kind is not TargetKind.EXPERTS)
    }


def write_adapters(
    targets: Targets,
    folder: Path,
    count: int,
    rank: int,
    *,
    projections: tuple[str, ...] = PROJECTIONS,
    experts: bool = True,
    first: int = 0,
    stride: int = 1,
) -> list[Path]:
    """`count` adapters of this rank on these projections of every layer that has them, with every
    `stride`-th number from `first` on; PEFT folders."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    found = chosen(targets, projections, experts=experts)
    for name, target in found.items():
        tensors.update(_pair(name, target, rank, generator))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in found}),
        "bias": "none",
    }
    numbers = range(first, first + count * stride, stride)
    folders = [folder / f"adapter-{number}" for number in numbers]
    for home in folders:
        home.mkdir(parents=True, exist_ok=True)
        (home / "adapter_config.json").write_text(json.dumps(config))
    if folders:
        files = [home / WEIGHTS_FILE for home in folders]
        save_file(tensors, files[0])
        changed = next(iter(tensors))
        _write_alike(files, changed, tensors[changed], numbers)
    return folders


def _write_alike(files: list[Path], name: str, tensor: torch.Tensor, numbers: range) -> None:
    """All files as the first, but for one tensor, which each has rolled by a number of its own."""
    at = _place_of(files[0], name)
    flat = tensor.reshape(-1)

    def write(file: Path, number: int) -> None:
        if file != files[0]:
            shutil.copyfile(files[0], file)
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(torch.roll(flat, number + 1).view(torch.uint8).numpy().tobytes())

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        list(threads.map(write, files[1:], numbers[1:]))
    write(files[0], numbers[0])


def _place_of(file: Path, name: str) -> int:
    """Where a tensor's bytes begin in a safetensors file."""
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))
    begin: int = header[name]["data_offsets"][0]
    return 8 + header_bytes + begin


def _pair(
    name: str, target: Target, rank: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Small enough that the model's outputs stay in range, whatever its depth."""
    if target.kind is not TargetKind.EXPERTS:
        return _matrices(f"base_model.model.{name}", target, rank, generator)
    layer, projection = name.rsplit(".", 1)
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(target.num_experts or 0):
        key = f"base_model.model.{layer}.{expert}.{projection}"
        tensors.update(_matrices(key, target, rank, generator))
    return tensors


def _matrices(
    key: str, target: Target, rank: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    a = torch.randn(rank, target.in_features, generator=generator) * target.in_features**-0.5
    b = torch.randn(target.out_features, rank, generator=generator) * 0.02
    return {
        f"{key}.lora_A.weight": a.to(torch.bfloat16),
        f"{key}.lora_B.weight": b.to(torch.bfloat16),
    }
