"""The tiers below the device: their sizes, and the code that moves their bytes.

Takes settings and the device's arenas; gives the sizes for the cache's decisions, and the object
that executes copies. Host memory is divided among families like the device's.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, Prefetch, WriteBack
from manyroots.config import EngineSettings, TierSettings
from manyroots.distributed.shard import Shard
from manyroots.errors import ConfigError
from manyroots.files.gguf_header import read_metadata
from manyroots.files.gguf_parts import parts_of
from manyroots.models.source import ModelSource
from manyroots.store.arena import UnitArena
from manyroots.store.backends.registry import open_backend
from manyroots.store.copy_ends import CopyEnds
from manyroots.store.host_arena import HostArena
from manyroots.store.layer_arrivals import LayerGroups
from manyroots.store.storage_link import UnitStorage
from manyroots.store.tier_copies import TierCopies

logger = logging.getLogger(__name__)

STAGING_SHARE = 0.25
"""For storage without a host tier: its pages pass through host memory of this share of the
device's, or of the longest request's size if that is larger."""
_READ_BYTES = 1 << 24


def check_tiers(settings: EngineSettings) -> None:
    """Refuse settings that cannot be combined."""
    tiers = settings.tiers
    if not tiers.is_on:
        return
    flag = "--kv-offloading-size" if tiers.has_host else "--kv-storage"
    if not settings.cache.enable_prefix_caching:
        raise ConfigError(
            f"{flag} keeps what the prefix cache has, and that is off; leave out "
            "--no-enable-prefix-caching."
        )


def with_host(
    settings: TierSettings,
    capacities: tuple[Capacity, ...],
    unit_bytes: Sequence[int],
    *,
    num_request_pages: int,
    num_ranks: int,
) -> tuple[Capacity, ...]:
    """Room on the host for each family, beside the device's. `unit_bytes`: of one rank's units.
    `num_request_pages`: of the longest request; without a host tier, this many pass through at
    once."""
    if not settings.is_on:
        return capacities
    sizes = list(zip(capacities, unit_bytes, strict=True))
    on_device = sum(capacity.num_device_units * size for capacity, size in sizes)
    wanted, least = _host_bytes(settings, sum(unit_bytes), num_ranks), 1
    if wanted is None:
        wanted, least = int(on_device * STAGING_SHARE), num_request_pages
    return tuple(
        replace(c, num_host_units=max(least, c.num_device_units * wanted // on_device))
        for c in capacities
    )


def _host_bytes(settings: TierSettings, page_bytes: int, num_ranks: int) -> int | None:
    """The requested size for one rank: a size in bytes covers all ranks together, as in vLLM. None
    without a host tier."""
    transfer = settings.transfer()
    num_pages = settings.num_host_pages or transfer.num_host_pages
    if num_pages is not None:
        return num_pages * page_bytes
    size = settings.kv_offloading_size
    num_bytes = transfer.host_bytes if size is None else int(size * 2**30)
    return None if num_bytes is None else num_bytes // num_ranks


def make_tiers(
    settings: TierSettings,
    device: Sequence[UnitArena],
    capacities: Sequence[Capacity],
    layers: Sequence[tuple[int, ...]],
    shard: Shard,
    ends: CopyEnds | None,
) -> TierCopies | None:
    """The object that executes one rank's copies below the device; None if there is no tier below.
    `layers`: for each family, the indexes of its layers in the model."""
    if not settings.is_on:
        return None
    host = [
        HostArena(capacity.num_host_units, arena.data)
        for capacity, arena in zip(capacities, device, strict=True)
    ]
    num_bytes = sum(arena.data.numel() * arena.data.itemsize for arena in host)
    kind = "host tier" if settings.has_host else "staging for storage in host memory"
    logger.info("%s: %.2f GiB%s", kind, num_bytes / 2**30, "" if shard.is_whole else " a rank")
    backend = open_backend(settings)
    storage = None
    if backend is not None:
        timeout_s = settings.kv_storage_timeout_s
        storage = UnitStorage(backend, timeout_s, shard.rank, shard.size)
    return TierCopies(device, host, storage, LayerGroups(tuple(layers)), ends)


def tier_policies(settings: TierSettings, *, is_gpu: bool = False) -> CachePolicies:
    """What the cache may do with these tiers."""
    overlap = settings.kv_load_overlap
    return CachePolicies(
        write_back=WriteBack(settings.write_back),
        uses_storage=settings.storage_url is not None,
        prefetch=Prefetch(settings.prefetch),
        prefetch_timeout_steps=settings.prefetch_timeout_steps,
        overlaps_loads=overlap == "on" or (overlap == "auto" and is_gpu),
        records_events=settings.events() is not None or bool(settings.kv_connectors),
    )


def model_identity(source: ModelSource, load_format: str, seed: int) -> bytes:
    """Identifies a model's weights: equal on every machine with the same files, and different if a
    single byte differs. Dummy weights are made from the seed."""
    if load_format == "dummy":
        return f"dummy weights of seed {seed} for {source.config.to_json_string()}".encode()
    files = _weight_files(source.path)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, files))
    whole = hashlib.blake2b(digest_size=32)
    for path, digest in zip(files, digests, strict=True):
        whole.update(b"%d:%s" % (len(path.name), path.name.encode()))
        whole.update(digest)
    return whole.digest()


def _weight_files(path: Path) -> list[Path]:
    """In a folder: the config and all files that may hold weights, by name. For a .gguf file: all
    parts of the model that starts with it."""
    if path.is_file():
        return parts_of(path, read_metadata(path))
    kinds = (".safetensors", ".gguf", ".bin")
    return sorted(p for p in path.iterdir() if p.name == "config.json" or p.suffix in kinds)


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.digest()
