"""Combines several adapters in host memory into one: their pairs side by side, each weighted.

Takes loaded weights; gives the weights of the sum in a new buffer. The ranks of a target's pairs
add up; A includes weight and scaling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.lora.files.combination import combined_digest
from manyroots.lora.spec import AdapterSpec, PairSpec
from manyroots.lora.targets import TargetKind, Targets
from manyroots.store.adapter_weights import AdapterWeights, LoraPair
from manyroots.store.host_memory import Allocate

WeightedPart = tuple[AdapterSpec, AdapterWeights, float]


def combine(
    parts: Sequence[WeightedPart], targets: Targets, *, max_rank: int, allocate: Allocate
) -> tuple[AdapterSpec, AdapterWeights]:
    """Raises AdapterError if they cannot be combined."""
    if any(spec.invocation_tokens is not None for spec, _, _ in parts):
        raise AdapterError("activated adapters (aLoRA) can't be combined; name one alone.")
    made = {
        name: _joined(name, target.kind, parts)
        for name, target in targets.items()
        if any(name in weights.pairs for _, weights, _ in parts)
    }
    rank = max(pair.rank for pair in made.values())
    if rank > max_rank:
        raise AdapterError(
            f"the adapters have rank {rank} together, and --max-lora-rank is {max_rank}; combine "
            "fewer or smaller ones, or raise it."
        )
    halves = [pair.a for pair in made.values()] + [pair.b for pair in made.values()]
    dtype = halves[0].dtype
    size = sum(half.numel() for half in halves)
    buffer = allocate(size * dtype.itemsize).view(dtype)
    cut = torch.split(buffer, [half.numel() for half in halves])
    places = [flat.view(half.shape) for flat, half in zip(cut, halves, strict=True)]
    for place, half in zip(places, halves, strict=True):
        place.copy_(half)
    pairs = {
        name: LoraPair(a, b, 1.0)
        for name, a, b in zip(made, places[: len(made)], places[len(made) :], strict=True)
    }
    digest = combined_digest((spec.digest, weight) for spec, _, weight in parts)
    weights = AdapterWeights(digest, pairs, buffer)
    told = tuple(PairSpec(name, pair.rank, 1.0) for name, pair in pairs.items())
    return AdapterSpec(digest, rank, weights.num_bytes, told), weights


def _joined(name: str, kind: TargetKind, parts: Sequence[WeightedPart]) -> LoraPair:
    found = [(weights.pairs[name], weight) for _, weights, weight in parts if name in weights.pairs]
    rank_dim = -1 if kind is TargetKind.EMBEDDING else -2
    a = [pair.a * (weight * pair.scaling) for pair, weight in found]
    b = [pair.b for pair, _ in found]
    if kind is TargetKind.EXPERTS:
        a, b = _same_experts(a), _same_experts(b)
    return LoraPair(torch.cat(a, rank_dim), torch.cat(b, -1), 1.0)


def _same_experts(halves: list[Tensor]) -> list[Tensor]:
    """If one adapter shares a matrix among experts and another does not, repeat it for each
    expert."""
    count = max(half.shape[0] for half in halves)
    return [half.expand(count, *half.shape[1:]) for half in halves]
