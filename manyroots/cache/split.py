"""Divides one memory among several families of layers (F09).

In: the bytes of a unit of each family, and the total. Out: units by family, such that one request
of the full length always fits, and no mix of requests starves one family while another has room.

A request of L tokens takes b * L bytes of a family with full attention, and b * min(L, window) of
one with a window. The share that each family needs thus depends on the unknown length of requests.
Each family gets memory in proportion to the *largest* share that it has of a request's memory, at
any length. At least 1 / (sum of these shares) of the requests then fit that would fit in a split
made for their length: half with two families, all with one. Lengths below `SHORT` do not count:
more of those fit than run at once in any case.

The tokens of a step come first: a family with a window holds them beside the windows. Memory that
requests do not hold is the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from manyroots.cache.families.family import Family
from manyroots.cache.planes import Capacity
from manyroots.errors import ConfigError

SHORT = 1024
"""Tokens. Planning for shorter requests would cost long ones a third of their memory if windows are
narrow (128 tokens in half of the layers)."""


@dataclass(frozen=True, slots=True)
class FamilyBytes:
    """One family, and the bytes of its units on the device."""

    family: Family
    unit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Assumptions about requests."""

    page_size: int
    max_model_len: int
    num_step_tokens: int
    """The most tokens that one step computes."""
    num_chunk_tokens: int
    """The most tokens of one request that one step computes."""

    def units(self, family: Family, num_tokens: int, num_chunk_tokens: int) -> int:
        """The most units of a request of this many tokens, if steps compute this many of it."""
        num_pages = -(-num_tokens // self.page_size)
        most = family.most_needed(min(num_tokens, num_chunk_tokens))
        return num_pages if most is None else min(num_pages, most)

    def least(self, family: Family) -> int:
        """Units that a request of the full length needs to finish."""
        return self.units(family, self.max_model_len, self.num_chunk_tokens)


def split(sizes: Sequence[FamilyBytes], num_bytes: int, demand: Demand) -> tuple[Capacity, ...]:
    """Units of each family. Raises ConfigError if not even one request of the full length fits."""
    least = [demand.least(size.family) for size in sizes]
    num_least_bytes = sum(n * s.unit_bytes for n, s in zip(least, sizes, strict=True))
    if num_least_bytes > num_bytes:
        raise ConfigError(
            f"{num_bytes} bytes are left for the cache, and one request of "
            f"{demand.max_model_len} tokens takes {num_least_bytes}. Raise "
            "--kv-cache-memory-bytes or --gpu-memory-utilization, or lower --max-model-len or "
            "--max-num-batched-tokens."
        )
    weights = largest_shares([s.unit_bytes for s in sizes], [s.family for s in sizes], demand)
    shares = _shares(sizes, num_bytes, least, weights, demand)
    units = [max(n, int(share // s.unit_bytes))
             for n, share, s in zip(least, shares, sizes, strict=True)]  # fmt: skip
    return tuple(Capacity(s.family, n) for s, n in zip(sizes, units, strict=True))


def longest_that_fits(sizes: Sequence[FamilyBytes], num_bytes: int, demand: Demand) -> int:
    """The longest request, of whole pages, that the memory holds; at most the full length. 0 if
    there is less than one page of each family."""
    low, high = 0, -(-demand.max_model_len // demand.page_size)
    while low < high:
        middle = (low + high + 1) // 2
        num_tokens = middle * demand.page_size
        taken = sum(
            s.unit_bytes * demand.units(s.family, num_tokens, demand.num_chunk_tokens)
            for s in sizes
        )
        low, high = (middle, high) if taken <= num_bytes else (low, middle - 1)
    return min(low * demand.page_size, demand.max_model_len)


def largest_shares(
    unit_bytes: Sequence[int], families: Sequence[Family], demand: Demand
) -> list[Fraction]:
    """By family: its largest share of a request's memory, for any length from SHORT to the full
    one. Between lengths at which a window is just filled, shares only rise or only fall."""
    longest = demand.max_model_len
    ends = {longest, min(SHORT, longest)}
    for family in families:
        most = family.most_needed(1)
        if most is not None:
            ends.add(min(max(SHORT, most * demand.page_size), longest))
    largest = [Fraction(0)] * len(families)
    for num_tokens in sorted(ends):
        taken = [demand.units(f, num_tokens, 1) * b
                 for f, b in zip(families, unit_bytes, strict=True)]  # fmt: skip
        shares = (Fraction(each, sum(taken)) for each in taken)
        largest = [max(pair) for pair in zip(largest, shares, strict=True)]
    return largest


def _shares(
    sizes: Sequence[FamilyBytes],
    num_bytes: int,
    least: list[int],
    weights: list[Fraction],
    demand: Demand,
) -> list[Fraction]:
    """Bytes by family: for windows a step's tokens first, then by weight, but at least the size of
    one request."""
    num_step_units = -(-demand.num_step_tokens // demand.page_size)
    steps = [0 if s.family.most_needed(1) is None else num_step_units * s.unit_bytes for s in sizes]
    shares = [Fraction(n * s.unit_bytes) for n, s in zip(least, sizes, strict=True)]
    others = list(range(len(sizes)))
    while True:
        taken = sum(share for i, share in enumerate(shares) if i not in others)
        rest = num_bytes - taken - sum(steps[i] for i in others)
        total = sum(weights[i] for i in others)
        wanted = {i: steps[i] + rest * weights[i] / total for i in others}
        if all(wanted[i] >= shares[i] for i in others):
            return [wanted.get(i, share) for i, share in enumerate(shares)]
        others = [i for i in others if wanted[i] >= shares[i]]


def told(capacities: Sequence[Capacity], sizes: Sequence[FamilyBytes], demand: Demand) -> list[str]:
    """Each family's share, and what it is enough for."""
    lines = []
    for capacity, size in zip(capacities, sizes, strict=True):
        num_units, longest = capacity.num_device_units, demand.max_model_len
        num_requests = num_units / demand.units(size.family, longest, 1)
        lines.append(
            f"{size.family.name}: {num_units} pages, {num_units * demand.page_size} tokens, "
            f"{num_units * size.unit_bytes / 2**30:.2f} GiB; "
            f"{num_requests:.1f} requests of {longest} tokens"
        )
    return lines
