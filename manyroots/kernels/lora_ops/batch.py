"""The adapters of one step: which tokens belong to which adapter.

Takes the slot of each flat token, once per step; gives the same `AdapterBatch` to every layer. A
*run* is a stretch of tokens with the same adapter; tokens of the base model are in no run. This
module also chooses how to compute runs: short runs of different adapters (decodes) together if
their weights are stacked, all others one by one.

    tokens   | base | base | s1 | s1 | s4 | base | s1 ......... |
    runs                    [2, 4) 1   [4, 5) 4   [6, 15) 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.lora_ops.stacks import Stack, Stacks
from manyroots.kernels.lora_ops.weights import SlotWeights

MAX_GROUPED_TOKENS = 32
"""Longer runs are computed separately (measured: 128 tokens cost the same either way)."""
MAX_WASTE = 2.0
"""A group may compute at most this many times the work of its runs; more padding costs too much."""

Slots = npt.NDArray[np.int64]


class AdapterMemory(Protocol):
    """The weights of adapters on the device."""

    @property
    def stacks(self) -> Stacks: ...

    def weights(self, slot: int) -> SlotWeights:
        """Raises RuntimeError if the slot is empty."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent tokens of one adapter."""

    tokens: slice
    slot: int
    weights: SlotWeights

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of different adapters that are computed together, padded to the longest."""

    stack: Stack
    tokens: slice | None
    """The tokens, if the runs are adjacent and of equal length: no padding and no gather."""
    cells: Tensor
    """int64 [num_runs * longest]: the token in each cell; padding repeats a token of its run."""
    places: Tensor
    """int64: the cells that are not padding."""
    rows: Tensor
    """int64: the tokens in those cells."""


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The adapters of one step."""

    runs: tuple[Run, ...]
    """All runs, in the order of the tokens."""
    alone: tuple[Run, ...]
    """Runs that are not in the group."""
    group: Group | None

    @classmethod
    def build(
        cls,
        token_slots: Slots,
        weights: Mapping[int, SlotWeights],
        stacks: Stacks | None,
        device: torch.device,
    ) -> AdapterBatch | None:
        """None if no token has an adapter. Raises KeyError for a slot that is not in `weights`.

        `stacks`: None for tokens that use few sites, which are computed run by run.
        """
        runs = tuple(_runs(token_slots, weights))
        if not runs:
            return None
        together = _choose(runs) if stacks is not None else []
        stack = None
        if stacks is not None and together:
            stack = stacks.find(tuple(run.weights for run in together))
        if stack is None:
            return cls(runs, runs, None)
        chosen = set(map(id, together))
        alone = tuple(run for run in runs if id(run) not in chosen)
        return cls(runs, alone, _group(together, stack, device))

    def with_slots(self, slots: npt.NDArray[np.int32], device: torch.device) -> AdapterBatch | None:
        """The batch of other tokens with these adapters, one run after the other."""
        weights = {run.slot: run.weights for run in self.runs}
        return AdapterBatch.build(slots.astype(np.int64), weights, None, device)

    def between(self, first: int, last: int) -> AdapterBatch | None:
        """The batch of the tokens [first, last) only; None if none of them has an adapter. Decodes,
        which come first, stay together if all of them are in this range."""
        runs = _clipped(self.runs, first, last)
        if not runs:
            return None
        group = self.group
        if group is None or first > 0 or int(group.rows.max()) >= last:
            return AdapterBatch(runs, runs, None)
        return AdapterBatch(runs, _clipped(self.alone, first, last), group)


def _clipped(runs: Sequence[Run], first: int, last: int) -> tuple[Run, ...]:
    return tuple(
        replace(
            run,
            tokens=slice(max(run.tokens.start, first) - first, min(run.tokens.stop, last) - first),
        )
        for run in runs
        if run.tokens.start < last and run.tokens.stop > first
    )


def _runs(token_slots: Slots, weights: Mapping[int, SlotWeights]) -> list[Run]:
    edges = (np.flatnonzero(np.diff(token_slots)) + 1).tolist()
    bounds = zip([0, *edges], [*edges, len(token_slots)], strict=True)
    found = ((start, end, int(token_slots[start])) for start, end in bounds if start < end)
    return [
        Run(slice(start, end), slot, weights[slot])
        for start, end, slot in found
        if slot != NO_ADAPTER
    ]


def _choose(runs: Sequence[Run]) -> list[Run]:
    """Short runs of different adapters, without those that would cause too much padding.

    Sorted by slot, for any order of the tokens: the same adapters in the next step then use the
    same stack.
    """
    by_slot: dict[int, Run] = {}
    for run in runs:
        if run.num_tokens <= MAX_GROUPED_TOKENS:
            by_slot.setdefault(run.slot, run)
    chosen = [by_slot[slot] for slot in sorted(by_slot)]
    chosen = _fitting(chosen, lambda run: run.num_tokens)
    chosen = _fitting(chosen, lambda run: run.weights.rank)
    return chosen if len(chosen) > 1 else []


def _fitting(runs: list[Run], size: Callable[[Run], int]) -> list[Run]:
    """Drop the longest run until padding the others to the longest of them pays."""
    kept = list(runs)
    while kept and len(kept) * max(map(size, kept)) > MAX_WASTE * sum(map(size, kept)):
        kept.remove(max(kept, key=size))
    return kept


def _group(runs: Sequence[Run], stack: Stack, device: torch.device) -> Group:
    starts = np.array([run.tokens.start for run in runs])
    counts = np.array([run.num_tokens for run in runs])
    longest = int(counts.max())
    offsets = np.arange(longest)
    is_real = offsets < counts[:, None]
    cells = np.where(is_real, starts[:, None] + offsets, starts[:, None])
    is_even = bool((np.diff(starts) == longest).all() and (counts == longest).all())
    flat = [cells.reshape(-1), np.flatnonzero(is_real), cells[is_real]]
    # One copy, because each copy to a GPU costs a round trip.
    packed = torch.from_numpy(np.concatenate(flat)).to(device)
    moved = torch.split(packed, [len(part) for part in flat])
    tokens = slice(runs[0].tokens.start, runs[-1].tokens.stop) if is_even else None
    return Group(stack, tokens, *moved)
