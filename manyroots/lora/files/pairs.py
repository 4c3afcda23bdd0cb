"""A low-rank pair of a model, made of tensors of a file: plain data and the checks all share.

See `store/adapter_weights.py` for the canonical shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyroots.errors import AdapterError
from manyroots.lora.files.modules import Home
from manyroots.lora.files.tensors import TensorEntry

_MAX_NAMED = 6
_EXPERTS = ".experts."
_EXPERT_TAIL = re.compile(r"(\d{1,9})\.(\w+\.lora_[AB](?:\.[^.]+)?\.weight)")


class Piece(NamedTuple):
    """One factor of a pair, as a view of tensors of the file."""

    tensors: tuple[int, ...]
    """Numbers in the header; several are stacked in this order."""
    shape: tuple[int, ...]
    """How their bytes are first seen."""
    axes: tuple[int, ...] | None = None
    """Then permuted, unless None."""
    rows: slice | None = None
    """Then cut to these in the dimension before the last."""


class PairLayout(NamedTuple):
    """One pair, in its canonical form."""

    target: str
    rank: int
    scaling: float
    a: Piece
    b: Piece
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterLayout:
    """In the order of the model's targets. Equal to itself alone."""

    pairs: tuple[PairLayout, ...]
    base_copies: tuple[tuple[str, int], ...]
    """Targets whose base weight the file repeats, and the number of the tensor that does."""


class Factor:
    """The tensors of one side of one module, by expert (None: no expert in the name)."""

    __slots__ = ("module", "spelled", "tensors")

    def __init__(self, module: str, spelled: str) -> None:
        self.module = module
        self.spelled = spelled
        """The module as the file calls it."""
        self.tensors: dict[int | None, int] = {}

    def put(self, expert: int | None, index: int, name: str) -> None:
        if expert in self.tensors:
            raise AdapterError(f"{name!r} is there in two spellings; keep one of them.")
        self.tensors[expert] = index


class ExpertFactors:
    """Finds the factor of an expert's tensor by its name, once another expert's was placed there.

    The names of a factor differ in the expert's number alone, and what follows `.experts.` is the
    same in every layer. Reading each name by itself would take most of the time of a file that has
    tens of thousands.
    """

    def __init__(self) -> None:
        self._factors: dict[tuple[str, str], Factor] = {}
        """By what is before the number, and what is after it."""
        self._tails: dict[str, tuple[int, str] | None] = {}
        """The number, and what is after it; None where there is none."""

    def learn(self, name: str, factor: Factor) -> None:
        """A tensor of an expert was placed in `factor`."""
        head, _, tail = name.partition(_EXPERTS)
        parts = self._parts(tail)
        if parts is not None and ".lora_" not in head:
            self._factors[head, parts[1]] = factor

    def put(self, name: str, index: int) -> bool:
        """Place a tensor; False if nothing is known of such names."""
        head, _, tail = name.partition(_EXPERTS)
        parts = self._parts(tail)
        factor = None if parts is None else self._factors.get((head, parts[1]))
        if parts is None or factor is None:
            return False
        factor.put(parts[0], index, name)
        return True

    def _parts(self, tail: str) -> tuple[int, str] | None:
        try:
            return self._tails[tail]
        except KeyError:
            match = _EXPERT_TAIL.fullmatch(tail)
            parts = None if match is None else (int(match.group(1)), match.group(2))
            self._tails[tail] = parts
            return parts


Factors = dict[Home, dict[str, Factor]]
"""`A` and `B` of each module of the file."""


def check_shape(entry: TensorEntry, wanted: Sequence[int], target: str) -> None:
    if entry.shape != tuple(wanted):
        raise AdapterError(
            f"{entry.name!r} has shape {list(entry.shape)}; {target} of this model and the "
            f"config's rank need {list(wanted)}. {_remedy(entry, wanted)}"
        )


def _remedy(entry: TensorEntry, wanted: Sequence[int]) -> str:
    if len(entry.shape) < 2 or 0 in entry.shape:
        return (
            "It is one process' part of the weight: gather it (DeepSpeed: GatheredParameters; "
            "FSDP: summon_full_params) and save the adapter again."
        )
    rank = -2 if ".lora_A" in entry.name or ".lora_embedding_A" in entry.name else -1
    sizes, others = list(entry.shape), list(wanted)
    if len(sizes) == len(others) and others.pop(rank) != sizes.pop(rank) and sizes == others:
        return (
            "Correct r or rank_pattern in the config: of its keys the first that matches counts, "
            "and PEFT saves them in alphabetical order."
        )
    return "Use an adapter that was trained for this model."


def named(names: Iterable[str]) -> str:
    ordered = list(dict.fromkeys(names))
    rest = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(name[:200] for name in ordered[:_MAX_NAMED]) + rest
