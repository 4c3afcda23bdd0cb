"""Computes the content and destination of an adapter's files, once for similar adapters.

Takes an adapter's open files; gives its config, its header and its layout. Adapters of one model
often have the same tensors in the same order. With experts, describing them in Python takes as long
as reading them from disk. The last few descriptions are therefore cached, and reused if config and
header are equal byte for byte.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from manyroots.errors import AdapterError
from manyroots.lora.files.config import AdapterConfig, check_invocation_tokens, read_config
from manyroots.lora.files.header import Header, header_bytes, parse_header
from manyroots.lora.files.layout import lay_out
from manyroots.lora.files.opened import AdapterFile
from manyroots.lora.files.pairs import AdapterLayout, Piece
from manyroots.lora.spec import PairSpec
from manyroots.lora.targets import Targets
from manyroots.store.adapter_bytes import Moves, places_of

MAX_KEPT = 4
FILE_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip

_Key = tuple[bytes, bytes, int]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of one adapter's files."""

    config: AdapterConfig
    header: Header
    layout: AdapterLayout
    spec_pairs: tuple[PairSpec, ...]
    """Descriptions of its pairs."""
    moves: Moves | None
    """How to move the file's bytes into canonical form; None if more than the order differs."""


class Layouts:
    """Layouts of one model's adapters, for an engine of one dtype. Called on any thread."""

    def __init__(
        self,
        targets: Targets,
        *,
        max_rank: int,
        dtype: torch.dtype,
        vocab_size: int,
        served: Set[str] | None = None,
    ) -> None:
        """`served`: the targets for which this engine has slots; None: all."""
        self._targets, self._max_rank = targets, max_rank
        self._served = targets.keys() if served is None else served
        self.dtype = dtype
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, FileLayout] = OrderedDict()
        """Guarded by the lock; most recently used last."""

    def of(self, config_file: AdapterFile, weights_file: AdapterFile) -> FileLayout:
        """Raises AdapterError if the files cannot be served."""
        config = read_config(config_file)
        check_invocation_tokens(config.invocation_tokens, self._vocab_size)
        raw = header_bytes(weights_file)
        key = (config_file.read(0, config_file.num_bytes), raw, weights_file.num_bytes)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        header = parse_header(weights_file, raw)
        layout = lay_out(header, config, self._targets, self._max_rank)
        self._check_served(layout)
        if config.invocation_tokens is not None:
            self._check_activated(layout)
        moves = None
        if _is_canonical(layout, header, self.dtype):
            moves = Moves.between(header.tensors, places_of(pieces_of(layout), header.tensors))
        told = tuple(PairSpec(pair.target, pair.rank, pair.scaling) for pair in layout.pairs)
        made = FileLayout(config, header, layout, told, moves)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made

    def _check_activated(self, layout: AdapterLayout) -> None:
        again = [p.target for p in layout.pairs if self._targets[p.target].is_recomputed]
        if again:
            raise AdapterError(
                f"the adapter has alora_invocation_tokens and changes {again[0]}, which is "
                "computed again for the tokens before its invocation; train an aLoRA without "
                f"{again[0].rpartition('.')[2]}, or a LoRA that acts from the first token."
            )

    def _check_served(self, layout: AdapterLayout) -> None:
        left_out = [pair.target for pair in layout.pairs if pair.target not in self._served]
        if left_out:
            modules = dict.fromkeys(name.rpartition(".")[2] for name in left_out)
            raise AdapterError(
                f"the adapter changes {', '.join(modules)}, which --lora-target-modules leaves "
                "out; start the server with these named there, too, or without that flag."
            )


def _is_canonical(layout: AdapterLayout, header: Header, dtype: torch.dtype) -> bool:
    """Whether the file's tensors have the canonical form, except for their order."""
    return (
        not layout.base_copies
        and {FILE_DTYPES[entry.dtype] for entry in header.tensors} == {dtype}
        and not any(p.axes is not None or p.rows is not None for p in pieces_of(layout))
    )


def pieces_of(layout: AdapterLayout) -> list[Piece]:
    """In the order of memory (see `AdapterWeights.buffer`)."""
    return [pair.a for pair in layout.pairs] + [pair.b for pair in layout.pairs]
