"""What an adapter's folder holds, said without a model: to be read before it is loaded.

Reads and hashes every byte, keeps none. Whether a certain model can serve it, `lay_out` says; what
no model can serve is refused here already.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from manyroots.ids import AdapterDigest
from manyroots.lora.files.config import AdapterConfig, read_config
from manyroots.lora.files.digest import content_digest, read_and_hash
from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE, check_folder, find_file
from manyroots.lora.files.header import Header, read_header
from manyroots.lora.files.keys import base_copy_of, parse_key, refuse_key
from manyroots.lora.files.opened import AdapterFile
from manyroots.lora.files.tensors import TensorEntry

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """All pairs whose names differ only in the numbers of layers and experts."""

    name: str
    """`model.layers.*.self_attn.q_proj`."""
    num_pairs: int
    a_shapes: tuple[tuple[int, ...], ...]
    b_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """Facts from the two files."""

    folder: Path
    digest: AdapterDigest
    base_model: str | None
    """As the config names it."""
    rank: int
    ranks: dict[str, int]
    """Where modules differ from `rank`: the config's patterns."""
    alpha: float
    is_rank_stabilised: bool
    invocation_tokens: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    """Of the weights, in the file."""
    modules: tuple[ModuleSummary, ...]


def describe_adapter(path: str | Path) -> AdapterDescription:
    """AdapterError if no model could serve it."""
    folder = check_folder(path, None)
    with (
        AdapterFile(find_file(folder, CONFIG_FILE, None)) as config_file,
        AdapterFile(find_file(folder, WEIGHTS_FILE, None)) as weights_file,
    ):
        config = read_config(config_file)
        header = read_header(weights_file)
        modules = _modules(header)
        chunks = read_and_hash(weights_file, header, None)
        weights_file.check_unchanged()
        config_file.check_unchanged()
    digest = content_digest(config.canonical(), header, chunks)
    return _description(folder, digest, config, header, modules)


def _description(
    folder: Path,
    digest: AdapterDigest,
    config: AdapterConfig,
    header: Header,
    modules: tuple[ModuleSummary, ...],
) -> AdapterDescription:
    return AdapterDescription(
        folder=folder,
        digest=digest,
        base_model=config.base_model,
        rank=config.rank,
        ranks=dict(config.ranks.items()),
        alpha=config.alpha,
        is_rank_stabilised=config.is_rank_stabilised,
        invocation_tokens=config.invocation_tokens,
        dtypes=tuple(sorted({tensor.dtype for tensor in header.tensors})),
        num_tensors=len(header.tensors),
        num_bytes=header.data_bytes,
        modules=modules,
    )


def _modules(header: Header) -> tuple[ModuleSummary, ...]:
    shapes: dict[str, dict[str, Counter[tuple[int, ...]]]] = {}
    for entry in header.tensors:
        name, side = _name_and_side(entry)
        if side is not None:
            sides = shapes.setdefault(_LAYER.sub(".*.", name), {"A": Counter(), "B": Counter()})
            sides[side][entry.shape] += 1
    return tuple(
        ModuleSummary(
            name,
            max(sides["A"].total(), sides["B"].total()),
            tuple(sorted(sides["A"])),
            tuple(sorted(sides["B"])),
        )
        for name, sides in sorted(shapes.items())
    )


def _name_and_side(entry: TensorEntry) -> tuple[str, str | None]:
    key = parse_key(entry.name)
    if key is not None:
        return key.module, key.side
    module = base_copy_of(entry.name)
    if module is None:
        raise refuse_key(entry.name)
    return module, None
