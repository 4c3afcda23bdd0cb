"""The execute half of adapters, put together: their slots, their loader, and how files are read.

Made once at start from the model; nothing is read yet. Says what the slots may take, so that the
cache leaves it alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from manyroots.config import LoraSettings
from manyroots.engine.adapter_desk import AdapterFiles
from manyroots.lora.limits import Limits
from manyroots.lora.spec import AdapterSpec
from manyroots.lora.targets import Targets, adapter_bytes
from manyroots.models.spec import ModelSpec
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_sites import SiteParts
from manyroots.store.adapter_slots import AdapterSlots
from manyroots.store.adapter_weights import AdapterWeights

logger = logging.getLogger(__name__)


class Adaptable(Protocol):
    """A model that adapters may change."""

    @property
    def spec(self) -> ModelSpec: ...

    def lora_parts(self) -> SiteParts: ...

    def adapter_targets(self) -> Targets: ...


@dataclass(frozen=True, slots=True)
class AdapterHalf:
    """What the runner and the desk need."""

    loader: AdapterLoader
    files: AdapterFiles
    max_device_bytes: int
    """What slots will take when each holds the largest adapter; 0 if their number has no limit, or
    if they have taken it."""


def build_adapter_half(
    settings: LoraSettings,
    model: Adaptable,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fused: bool,
) -> AdapterHalf:
    """`fused`: for a runner with fused kernels, which find adapters in a pool."""
    targets = model.adapter_targets()

    def read(
        folder: Path, allowed_dirs: Sequence[Path] | None
    ) -> tuple[AdapterSpec, AdapterWeights]:
        return read_adapter(
            folder,
            targets,
            max_rank=settings.max_lora_rank,
            dtype=dtype,
            pin=device.type == "cuda",
            vocab_size=model.spec.vocab_size,
            allowed_dirs=allowed_dirs,
        )

    num_slots = adapter_limits(settings).num_slots
    memory: AdapterSlots | AdapterPool
    if fused and num_slots is not None:
        memory = AdapterPool(
            model.lora_parts(),
            num_slots=num_slots,
            max_rank=settings.max_lora_rank,
            dtype=dtype,
            device=device,
        )
    else:
        memory = AdapterSlots(model.lora_parts(), dtype=dtype, device=device)
    # The digest shows whether files that were allowed once have been replaced since.
    loader = AdapterLoader(lambda path: read(Path(path), None)[1], memory)
    size = adapter_bytes(targets, settings.max_lora_rank, dtype.itemsize)
    logger.info(
        "adapters: %s slots of up to %.1f MiB (rank %d in all of %d weights), %s; %d names",
        num_slots or "any number of", size / 2**20, settings.max_lora_rank,
        len(targets),
        f"{num_slots * size / 2**20:.1f} MiB in all" if num_slots else "no limit",
        len(settings.lora_modules),
    )  # fmt: skip
    # A pool has taken its memory already.
    later = 0 if isinstance(memory, AdapterPool) else (num_slots or 0) * size
    return AdapterHalf(loader, AdapterFiles(read, loader.keep), later)


def adapter_limits(settings: LoraSettings) -> Limits:
    return Limits(max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras)
