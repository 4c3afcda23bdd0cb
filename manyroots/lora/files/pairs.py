"""A low-rank pair of a model, made of tensors of a file: plain data and the checks all share.

See `store/adapter_weights.py` for the canonical shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from manyroots.errors import AdapterError
from manyroots.lora.files.header import TensorEntry
from manyroots.lora.files.modules import Home

_MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """One half of a pair, as a view of tensors of the file."""

    tensors: tuple[int, ...]
    """Numbers in the header; several are stacked in this order."""
    shape: tuple[int, ...]
    """How their bytes are first seen."""
    axes: tuple[int, ...] | None = None
    """Then permuted, unless None."""
    rows: tuple[int, int] | None = None
    """Then cut to these in the dimension before the last: [first, past the last)."""


@dataclass(frozen=True, slots=True)
class PairLayout:
    """One pair, in its canonical form."""

    target: str
    rank: int
    scaling: float
    a: Piece
    b: Piece
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """In the order of the model's targets."""

    pairs: tuple[PairLayout, ...]
    base_copies: tuple[tuple[str, int], ...]
    """Targets whose base weight the file repeats, and the number of the tensor that does."""


class Half:
    """The tensors of one side of one module, by expert (None: no expert in the name)."""

    __slots__ = ("module", "tensors")

    def __init__(self, module: str) -> None:
        self.module = module
        self.tensors: dict[int | None, int] = {}


Halves = dict[Home, dict[str, Half]]
"""`A` and `B` of each module of the file."""


def check_shape(entry: TensorEntry, wanted: Sequence[int], target: str) -> None:
    if entry.shape != tuple(wanted):
        raise AdapterError(
            f"{entry.name!r} has shape {list(entry.shape)}; {target} of this model and the "
            f"config's rank need {list(wanted)}. Use an adapter that was trained for this model."
        )


def named(names: Iterable[str]) -> str:
    ordered = list(dict.fromkeys(names))
    rest = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(name[:200] for name in ordered[:_MAX_NAMED]) + rest
