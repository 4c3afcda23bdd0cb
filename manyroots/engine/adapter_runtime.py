"""What executes adapters, put together: their slots, their loader, and how files are read.

Made once at start from the model; no weight is read yet. Says what the slots may take, so that the
cache leaves it alone. Of a model that ranks share, files are of the whole and slots of the part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Protocol

import torch

from manyroots.config import LoraSettings
from manyroots.distributed.shard import Shard
from manyroots.engine.adapter_directory import AdapterFiles
from manyroots.errors import AdapterError
from manyroots.lora.files.combination import FoundPart, parts_of_path
from manyroots.lora.files.memory import MemoryAdapter
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.spec import AdapterSpec
from manyroots.lora.targets import Targets, adapter_bytes
from manyroots.models.sharding import cut_adapter, whole_targets
from manyroots.models.spec import ModelSpec
from manyroots.store.adapter_base import BaseRows
from manyroots.store.adapter_combination import combine
from manyroots.store.adapter_files import foresee, read_files, read_folder
from manyroots.store.adapter_layouts import Layouts
from manyroots.store.adapter_loader import AdapterLoader, Read
from manyroots.store.adapter_pool import AdapterPool, pooled_rank
from manyroots.store.adapter_sites import SiteParts, parts_named, targets_in
from manyroots.store.adapter_weights import AdapterWeights
from manyroots.store.host_memory import PinnedMemory, lock_filled, locked, pageable
from manyroots.store.sources.address import is_address
from manyroots.store.sources.sources import AdapterSources

logger = logging.getLogger(__name__)

MakeLoader = Callable[[Read, AdapterPool], AdapterLoader]


class Adaptable(Protocol):
    """A model that adapters may change."""

    shard: Shard

    @property
    def spec(self) -> ModelSpec: ...

    def lora_parts(self) -> SiteParts: ...

    def adapter_targets(self) -> Targets: ...

    def base_rows(self) -> Mapping[str, BaseRows]: ...


@dataclass(frozen=True, slots=True)
class AdapterRuntime:
    """What the runner and the directory need."""

    loader: AdapterLoader
    files: AdapterFiles


def build_adapter_runtime(
    settings: LoraSettings,
    model: Adaptable,
    dtype: torch.dtype,
    device: torch.device,
    make_loader: MakeLoader = AdapterLoader,
    *,
    num_slots: int,
) -> AdapterRuntime:
    shard = model.shard
    own = model.adapter_targets()
    targets = whole_targets(own, shard, model.spec.vocab_size)
    parts = parts_named(model.lora_parts(), settings.lora_target_modules)
    served = {name: target for name, target in targets.items() if name in parts}

    largest = adapter_bytes(served, settings.max_lora_rank, dtype.itemsize)
    pinned = None
    if device.type == "cuda":
        pinned = PinnedMemory(
            largest, partial(locked, device=device), partial(lock_filled, device=device)
        )

    layouts = Layouts(
        targets, max_rank=settings.max_lora_rank, dtype=dtype, vocab_size=model.spec.vocab_size,
        served=frozenset(served),
    )  # fmt: skip

    if device.type == "cuda":
        # Beside the rest of the start, which is nearly all a compiler's.
        paths = [module.path for module in settings.lora_modules if not is_address(module.path)]
        Thread(target=foresee, args=(paths, layouts), name="foresee", daemon=True).start()

    sources = AdapterSources(settings)

    def read(
        folder: Path, allowed_dirs: Sequence[Path] | None
    ) -> tuple[AdapterSpec, AdapterWeights]:
        allocate = pinned or pageable
        found = read_folder(
            folder, layouts, allowed_dirs=allowed_dirs, allocate=allocate, base=model.base_rows()
        )
        if pinned is not None:
            pinned.lock(found[1].buffer)
        return found

    def read_memory(adapter: MemoryAdapter) -> tuple[AdapterSpec, AdapterWeights]:
        found = read_files(
            adapter.config, adapter.weights, layouts, allocate=pinned or pageable,
            base=model.base_rows(),
        )  # fmt: skip
        if pinned is not None:
            pinned.lock(found[1].buffer)
        return found

    def read_combined(found: Sequence[FoundPart]) -> tuple[AdapterSpec, AdapterWeights]:
        parts = []
        for part in found:
            with sources.reading(Path(part.path)) as folder:
                spec, weights = read(folder, None)
            if spec.digest != part.digest:
                raise AdapterError(
                    f"the files at {part.path} changed since the adapter was opened; load it again"
                )
            parts.append((spec, weights, part.weight))
        made = combine(parts, served, max_rank=settings.max_lora_rank, allocate=pinned or pageable)
        if pinned is not None:
            pinned.lock(made[1].buffer)
        return made

    def read_part(path: str) -> AdapterWeights:
        if (parts := parts_of_path(path)) is not None:
            return cut_adapter(read_combined(parts)[1], shard, own)
        # The digest shows whether files that were allowed once have been replaced since.
        with sources.reading(Path(path)) as folder:
            return cut_adapter(read(folder, None)[1], shard, own)

    pool = AdapterPool(
        parts,
        num_slots=num_slots,
        num_at_once=settings.max_loras or num_slots,
        max_rank=settings.max_lora_rank,
        dtype=dtype,
        device=device,
    )
    loader = make_loader(read_part, pool)
    _log(settings, num_slots, len(served), slot_bytes(settings, model, dtype))
    files = AdapterFiles(
        read, loader.keep, read_memory=read_memory, read_combined=read_combined, sources=sources
    )
    return AdapterRuntime(loader, files if pinned is None else replace(files, close=pinned.close))


def slot_bytes(settings: LoraSettings, model: Adaptable, dtype: torch.dtype) -> int:
    """What a slot takes, on this rank, when it holds the largest adapter."""
    rank = pooled_rank(settings.max_lora_rank)
    parts = parts_named(model.lora_parts(), settings.lora_target_modules)
    return adapter_bytes(targets_in(parts), rank, dtype.itemsize)


def _log(settings: LoraSettings, num_slots: int, num_targets: int, size: int) -> None:
    logger.info(
        "adapters: %d slots%s of up to %.1f MiB (rank %d in each of %d weights), %.1f MiB in all; "
        "%d names",
        num_slots, "" if settings.max_loras else " (as many as fit: --max-loras 0)", size / 2**20,
        settings.max_lora_rank, num_targets, num_slots * size / 2**20, len(settings.lora_modules),
    )  # fmt: skip


def adapter_limits(settings: LoraSettings, num_slots: int) -> AdapterLimits:
    """`num_slots`: those there are, some to spare, whether --max-loras says so or left it open; 0
    without --enable-lora."""
    num_at_once = min(settings.max_loras or num_slots, num_slots)
    return AdapterLimits(
        max_loras=num_at_once,
        max_cpu_loras=settings.max_cpu_loras,
        num_spare_slots=num_slots - num_at_once,
    )
