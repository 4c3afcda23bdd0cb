"""What an adapter is, in plain frozen data: the result of reading and checking its files.

Holds no weight. `digest` covers every byte of weights and config that matters, so that two
adapters with the same digest compute the same (N20).
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.ids import AdapterDigest


@dataclass(frozen=True, slots=True)
class PairSpec:
    """One low-rank pair of an adapter."""

    target: str
    """A name among the model's targets."""
    rank: int
    scaling: float
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter that this model can serve."""

    digest: AdapterDigest
    rank: int
    """The highest of its pairs."""
    num_bytes: int
    """Its weights in the engine's dtype."""
    pairs: tuple[PairSpec, ...] = ()
    """What it changes; only readers of its files need it."""
    invocation_tokens: tuple[int, ...] | None = None
    """aLoRA: the adapter acts from the last place in the prompt where these begin; None for an
    ordinary adapter, which acts everywhere."""
    device_bytes: int | None = None
    """What they take on the device of one rank, with padding; None: `num_bytes`."""
