"""Layers with windows: what share of a model's keys and values has which window.

In: texts like `512:5/6`, of the settings, and memory as a number of pages of all layers. Out: the
families of a cache with their units, split as the engine splits its memory.
"""

from __future__ import annotations

import math
from fractions import Fraction

from manyroots.cache.families.attention import attention_families
from manyroots.cache.planes import Capacity
from manyroots.cache.split import Demand, FamilyBytes, longest_that_fits, split, told
from manyroots.errors import ConfigError


def parse_windows(texts: tuple[str, ...]) -> dict[int | None, Fraction]:
    """By window, None for layers that see everything: the share of a token's bytes."""
    shares: dict[int | None, Fraction] = {}
    for text in texts:
        window, _, share = text.partition(":")
        try:
            size, part = int(window), Fraction(share)
        except (ValueError, ZeroDivisionError):
            size, part = 0, Fraction(0)
        if size < 1 or not 0 < part <= 1 or size in shares:
            raise ConfigError(
                f"--window is {text!r}; write SIZE:SHARE, as 512:5/6 for windows of 512 tokens in "
                "five layers of six, each size once."
            )
        shares[size] = part
    rest = Fraction(1) - sum(shares.values())
    if rest < 0:
        raise ConfigError(f"--window: the shares of {', '.join(texts)} are more than all layers.")
    return {None: rest, **shares} if rest else shares


def family_bytes(
    shares: dict[int | None, Fraction], demand: Demand
) -> tuple[tuple[FamilyBytes, ...], int]:
    """The families, with a unit's bytes in whole numbers, and what a page of all layers takes."""
    whole = math.lcm(*(share.denominator for share in shares.values()))
    families = attention_families(
        [*shares], page_size=demand.page_size, max_model_len=demand.max_model_len
    )
    sizes = [int(share * whole) for share in shares.values()]
    return tuple(FamilyBytes(f, n) for f, n in zip(families, sizes, strict=True)), whole


def window_capacities(
    texts: tuple[str, ...], num_pages: int, demand: Demand
) -> tuple[Capacity, ...]:
    """Units of each family in the memory of so many pages of all layers."""
    sizes, whole = family_bytes(parse_windows(texts), demand)
    return split(sizes, num_pages * whole, demand)


def told_split(
    texts: tuple[str, ...], num_pages: int, bytes_per_page: float, demand: Demand
) -> list[str]:
    """What each family got, line by line, where a page of all layers takes so many bytes."""
    sizes, whole = family_bytes(parse_windows(texts), demand)
    found = split(sizes, num_pages * whole, demand)
    real = [FamilyBytes(s.family, round(s.unit_bytes / whole * bytes_per_page)) for s in sizes]
    return told(found, real, demand)


def longest_request(texts: tuple[str, ...], num_pages: int, demand: Demand) -> int:
    """The longest request that fits into that memory, up to the demand's."""
    sizes, whole = family_bytes(parse_windows(texts), demand)
    return longest_that_fits(sizes, num_pages * whole, demand)
