"""Everything that executes adapters: their slots, their loader, and reading their files.

Made once at start from the model; no weight is read yet. Reports the memory of slots, so that the
cache does not use it. With several ranks, files describe the whole model and slots this rank's
part.
"""

from __future__ import annotations

import contextlib
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
from manyroots.lora.files.folder import WEIGHTS_FILE
from manyroots.lora.files.memory import MemoryAdapter
from manyroots.lora.limits import MAX_OPEN_SLOTS, AdapterLimits, DeviceBlocks
from manyroots.lora.spec import AdapterSpec
from manyroots.lora.targets import Targets, adapter_bytes
from manyroots.models.sharding import cut_adapter, whole_targets
from manyroots.models.spec import ModelSpec
from manyroots.store.adapter_base import BaseRows
from manyroots.store.adapter_combination import combine
from manyroots.store.adapter_files import foresee, read_files, read_folder
from manyroots.store.adapter_layouts import Layouts
from manyroots.store.adapter_loader import AdapterLoader, Read
from manyroots.store.adapter_pool import AdapterPool, pooled_bytes, pooled_rank
from manyroots.store.adapter_sites import SiteParts, parts_named, targets_in
from manyroots.store.adapter_weights import AdapterWeights
from manyroots.store.host_memory import PinnedMemory, lock_filled, locked, pageable
from manyroots.store.mapped_device import BLOCK_BYTES, can_map
from manyroots.store.sources.address import is_address
from manyroots.store.sources.sources import AdapterSources

logger = logging.getLogger(__name__)

CPU_BLOCK_BYTES = 64 << 10
MAX_ADDRESSES = 16 << 40
"""Most address space that slots may take, of the 128 TiB of a process."""

MakeLoader = Callable[[Read, AdapterPool], AdapterLoader]


class Adaptable(Protocol):
    """A model that adapters may change."""

    shard: Shard

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def spec(self) -> ModelSpec: ...

    def lora_parts(self) -> SiteParts: ...

    def adapter_targets(self) -> Targets: ...

    def base_rows(self) -> Mapping[str, BaseRows]: ...


@dataclass(frozen=True, slots=True)
class AdapterRuntime:
    """The interface for the runner and the directory."""

    loader: AdapterLoader
    files: AdapterFiles


def build_adapter_runtime(
    settings: LoraSettings,
    model: Adaptable,
    dtype: torch.dtype,
    device: torch.device,
    make_loader: MakeLoader = AdapterLoader,
    *,
    room: int,
    max_num_seqs: int,
) -> AdapterRuntime:
    """`room`: a number of slots, or of blocks if memory is counted in blocks (`block_bytes`)."""
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
        # In parallel with the rest of the start, which mostly compiles.
        paths = [module.path for module in settings.lora_modules if not is_address(module.path)]
        Thread(target=foresee, args=(paths, layouts), name="foresee", daemon=True).start()

    sources = AdapterSources(settings)

    def sized(
        found: tuple[AdapterSpec, AdapterWeights],
    ) -> tuple[AdapterSpec, AdapterWeights]:
        """The adapter, with its size on the device."""
        spec, weights = found
        if pinned is not None:
            pinned.lock(weights.buffer)
        size = pooled_bytes(
            weights, is_transposed=device.type == "cpu", cut=partial(_cut_sizes, targets, own)
        )
        return replace(spec, device_bytes=size), weights

    def read(
        folder: Path, allowed_dirs: Sequence[Path] | None
    ) -> tuple[AdapterSpec, AdapterWeights]:
        allocate = pinned or pageable
        return sized(
            read_folder(
                folder, layouts, allowed_dirs=allowed_dirs, allocate=allocate,
                base=model.base_rows(),
            )
        )  # fmt: skip

    def read_memory(adapter: MemoryAdapter) -> tuple[AdapterSpec, AdapterWeights]:
        return sized(
            read_files(
                adapter.config, adapter.weights, layouts, allocate=pinned or pageable,
                base=model.base_rows(),
            )
        )  # fmt: skip

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
        return sized(
            combine(parts, served, max_rank=settings.max_lora_rank, allocate=pinned or pageable)
        )

    def read_part(path: str) -> AdapterWeights:
        if (parts := parts_of_path(path)) is not None:
            return cut_adapter(read_combined(parts)[1], shard, own)
        # The digest shows whether files that were checked before have been replaced since.
        with sources.reading(Path(path)) as folder:
            return cut_adapter(read(folder, None)[1], shard, own)

    blocks = device_blocks(settings, room, model)
    num_slots = room if blocks is None else blocks.num_slots
    pool = AdapterPool(
        parts,
        num_slots=num_slots,
        num_blocks=None if blocks is None else blocks.num_blocks,
        num_at_once=settings.max_loras or min(num_slots, max_num_seqs),
        max_rank=settings.max_lora_rank,
        dtype=dtype,
        device=device,
    )
    loader = make_loader(read_part, pool)
    _log(settings, room, len(served), slot_bytes(settings, model, dtype), blocks)
    files = AdapterFiles(
        read, loader.keep, read_memory=read_memory, read_combined=read_combined, sources=sources
    )
    return AdapterRuntime(loader, files if pinned is None else replace(files, close=pinned.close))


def slot_bytes(settings: LoraSettings, model: Adaptable, dtype: torch.dtype) -> int:
    """Bytes of a slot on this rank when it holds the largest adapter."""
    rank = pooled_rank(settings.max_lora_rank)
    parts = parts_named(model.lora_parts(), settings.lora_target_modules)
    return adapter_bytes(targets_in(parts), rank, dtype.itemsize)


def block_bytes(settings: LoraSettings, device: torch.device) -> int | None:
    """Size of the blocks in which adapters share memory. None if slots are counted: --max-loras is
    a number, or the device cannot map memory."""
    if settings.max_loras:
        return None
    if device.type == "cpu":
        return CPU_BLOCK_BYTES
    return BLOCK_BYTES if can_map(device) else None


def device_blocks(settings: LoraSettings, room: int, model: Adaptable) -> DeviceBlocks | None:
    """None if slots are counted."""
    if settings.max_loras or not settings.enable_lora:
        return None
    size = block_bytes(settings, model.device)
    if size is None:
        return None
    most = MAX_ADDRESSES // max(slot_bytes(settings, model, model.dtype), size)
    if settings.adapter_memory_bytes is None or model.device.type != "cpu":
        most = min(most, room)  # else pages may lend more
    return DeviceBlocks(room, size, num_slots=max(1, min(MAX_OPEN_SLOTS, most)))


def known_bytes(settings: LoraSettings) -> int:
    """Bytes on disk of the adapters in --lora-modules. Opens no file; missing ones count as
    zero."""
    total = 0
    for module in settings.lora_modules:
        with contextlib.suppress(OSError, ValueError):
            total += (Path(module.path).expanduser() / WEIGHTS_FILE).stat().st_size
    return total


def _cut_sizes(
    whole: Targets, own: Targets, name: str, a_size: int, b_size: int
) -> tuple[int, int]:
    """This rank's part of an adapter pair, A and B, of the whole model."""
    all_of, mine = whole[name], own[name]
    return (
        a_size // all_of.in_features * mine.in_features,
        b_size // all_of.out_features * mine.out_features,
    )


def _log(
    settings: LoraSettings, room: int, num_targets: int, size: int, blocks: DeviceBlocks | None
) -> None:
    largest, num_names = size / 2**20, len(settings.lora_modules)
    if blocks is None:
        logger.info(
            "adapters: %d slots of up to %.1f MiB (rank %d in each of %d weights), %.1f MiB in "
            "all; %d names",
            room, largest, settings.max_lora_rank, num_targets, room * largest, num_names,
        )  # fmt: skip
        return
    logger.info(
        "adapters: %.1f MiB on the device, in blocks of %.2f MiB (--max-loras auto); one of rank "
        "%d in each of %d weights takes %.1f MiB; %d names",
        blocks.num_blocks * blocks.block_bytes / 2**20, blocks.block_bytes / 2**20,
        settings.max_lora_rank, num_targets, largest, num_names,
    )  # fmt: skip


def adapter_limits(settings: LoraSettings, room: int, model: Adaptable) -> AdapterLimits:
    """`room`: the number of slots, including spare ones, or of blocks; 0 without --enable-lora."""
    blocks = device_blocks(settings, room, model)
    if blocks is not None:
        return AdapterLimits(max_loras=0, max_cpu_loras=settings.max_cpu_loras, blocks=blocks)
    num_at_once = min(settings.max_loras or room, room)
    return AdapterLimits(
        max_loras=num_at_once,
        max_cpu_loras=settings.max_cpu_loras,
        num_spare_slots=room - num_at_once,
    )
