"""The weights of several adapters side by side, for one batched product.

Takes a set of adapters that decode together; gives their weights per site as [adapters, ...],
padded to the highest rank among them, projection by projection. This is a second copy, made site by
site on demand, and only for a set that occurs again. A set that occurs for one step is cheaper to
compute one by one.

For projections that an adapter does not change, the sums are sums of exact zeros. Adapters in one
stack therefore do not affect each other.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.lora_ops.weights import LowRank, Part, Site, SlotWeights

NUM_REMEMBERED = 16
"""Number of sets that were seen but have no stack yet, and the steps for which an unused stack
keeps its memory. Without the second, alternating sets would be copied in each step."""

Members = tuple[SlotWeights, ...]
Columns = tuple[int, int]
"""Start and end of a projection in the product."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """One product of several adapters."""

    a: Tensor
    """[adapters, in, sum of ranks]: a quarter faster for few rows than transposed."""
    parts: tuple[Part, ...]
    """For each projection that any of them changes, `b` [adapters, highest rank, out]. In one
    matrix for all projections most numbers were zeros: gate and up took a quarter more time, and
    bytes."""


class Stack:
    """The linear sites of some adapters, stacked on first use."""

    def __init__(self, members: Members, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        """Bytes when all sites are stacked."""
        self.last_step = 0
        self._members = members
        self._by_site: dict[Site, Stacked | None] = {}

    def get(self, site: Site) -> Stacked | None:
        """None if none of the adapters changes this product."""
        try:
            return self._by_site[site]
        except KeyError:
            stacked = self._by_site[site] = _stack(
                [member.linears.get(site) for member in self._members]
            )
            return stacked


class Stacks:
    """The stacks of recent sets of adapters, within a limit of memory.

    Steps look them up on one thread while other threads load and unload adapters.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        """0: never stack."""
        self._lock = threading.Lock()
        # Guards everything below.
        self._stacks: dict[Members, Stack] = {}
        self._seen: deque[Members] = deque(maxlen=NUM_REMEMBERED)
        self._step = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all stacks when they are complete."""
        return sum(stack.num_bytes for stack in self._stacks.values())

    def find(self, members: Members) -> Stack | None:
        """The stack of a step's adapters, if it is worthwhile. Called once per step."""
        if self._max_bytes == 0:
            return None
        with self._lock:
            return self._find(members)

    def _find(self, members: Members) -> Stack | None:
        self._step += 1
        stack = self._stacks.get(members)
        if stack is None:
            if members not in self._seen:
                self._seen.append(members)
                return None
            stack = Stack(members, _stacked_bytes(members))
            if not self._make_room(stack.num_bytes):
                return None
            self._stacks[members] = stack
        stack.last_step = self._step
        return stack

    def _make_room(self, num_bytes: int) -> bool:
        oldest_first = sorted(self._stacks, key=lambda members: self._stacks[members].last_step)
        for members in oldest_first:
            if self.num_bytes + num_bytes <= self._max_bytes:
                break
            if self._step - self._stacks[members].last_step <= NUM_REMEMBERED:
                return False
            del self._stacks[members]
        return self.num_bytes + num_bytes <= self._max_bytes

    def forget(self, weights: SlotWeights) -> None:
        """Drop every copy of weights that leave the device."""
        with self._lock:
            for members in [members for members in self._stacks if weights in members]:
                del self._stacks[members]
            kept = [members for members in self._seen if weights not in members]
            self._seen = deque(kept, maxlen=NUM_REMEMBERED)


def _stack(members: list[LowRank | None]) -> Stacked | None:
    present = [member for member in members if member is not None]
    if not present:
        return None
    like = present[0].a
    ranks = _ranks_by_columns(present)
    a = like.new_zeros(len(members), like.shape[1], sum(ranks.values()))
    parts: dict[Columns, Part] = {}
    begin = 0
    for columns, rank in ranks.items():
        b = like.new_zeros(len(members), rank, columns[1] - columns[0])
        parts[columns] = Part(slice(begin, begin + rank), slice(*columns), b)
        begin += rank
    for index, member in enumerate(members):
        for own in () if member is None else member.parts:
            assert member is not None
            part = parts[own.columns.start, own.columns.stop]
            rank = own.b.shape[0]
            first = part.ranks.start
            a[index, :, first : first + rank] = member.a[own.ranks].t()
            part.b[index, :rank] = own.b
    return Stacked(a, tuple(parts.values()))


def _ranks_by_columns(members: list[LowRank]) -> dict[Columns, int]:
    """The highest rank of each projection that one of them changes."""
    ranks: dict[Columns, int] = {}
    for member in members:
        for part in member.parts:
            columns = (part.columns.start, part.columns.stop)
            ranks[columns] = max(ranks.get(columns, 0), part.b.shape[0])
    return dict(sorted(ranks.items()))


def _stacked_bytes(members: Members) -> int:
    total = 0
    for site in {site for member in members for site in member.linears}:
        present = [member.linears[site] for member in members if site in member.linears]
        like = present[0].a
        numbers = sum(
            rank * (like.shape[1] + stop - start)
            for (start, stop), rank in _ranks_by_columns(present).items()
        )
        total += len(members) * numbers * like.element_size()
    return total


def default_stack_bytes(device: torch.device) -> int:
    """Half a GiB on a CPU. None on a GPU, where pages have the memory."""
    return 2**29 if device.type == "cpu" else 0
