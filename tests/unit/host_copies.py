"""Adapters in host memory, made from plain tensors instead of files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manyroots.ids import AdapterDigest
from manyroots.lora.targets import Target, TargetKind, Targets
from manyroots.store.adapter_weights import AdapterWeights, LoraPair


def host_copy(pairs: Mapping[str, tuple[Tensor, Tensor, float]], name: str) -> AdapterWeights:
    """(A, B, scaling) by target, cut from one flat buffer as files are read."""
    halves = [half for a, b, _ in pairs.values() for half in (a, b)]
    flat = [half.detach().reshape(-1) for half in halves] or [torch.empty(0)]
    buffer = torch.cat(flat)
    cut = iter(torch.split(buffer, [half.numel() for half in halves]))
    return AdapterWeights(
        digest=AdapterDigest(name.encode()),
        pairs={
            target: LoraPair(next(cut).view(a.shape), next(cut).view(b.shape), scaling)
            for target, (a, b, scaling) in pairs.items()
        },
        buffer=buffer,
    )


def random_adapter(
    targets: Targets,
    ranks: Mapping[str, int],
    *,
    seed: int,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> AdapterWeights:
    """Random pairs for the targets in `ranks`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def pair(target: Target, rank: int) -> tuple[Tensor, Tensor, float]:
        is_lookup = target.kind is TargetKind.EMBEDDING
        a = (target.in_features, rank) if is_lookup else (rank, target.in_features)
        return draw(*a), draw(target.out_features, rank), scaling

    pairs = {name: pair(targets[name], rank) for name, rank in ranks.items()}
    return host_copy(pairs, f"seed {seed}")
