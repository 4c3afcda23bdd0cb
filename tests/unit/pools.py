"""A pool of a small made-up model, and adapters for it: to test kernels and the pool itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.kernels.lora_ops.sites import EmbeddingSite, LinearSite
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_sites import LoraSite
from manyroots.store.adapter_weights import AdapterWeights
from tests.unit.host_copies import host_copy

CPU = torch.device("cpu")
HIDDEN, OUTS, VOCABULARY = 24, (16, 8, 8), 31
QKV = LoraSite(TargetKind.LINEAR, HIDDEN, dict(zip("qkv", OUTS, strict=True)))
OTHER = LoraSite(TargetKind.LINEAR, HIDDEN, {"": HIDDEN})
EMBEDDING = LoraSite(TargetKind.EMBEDDING, VOCABULARY, {"": HIDDEN}, factor=1.5)


def adapter(
    ranks: Sequence[int],
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    lookup_rank: int = 3,
    scaling: float | None = None,
) -> AdapterWeights:
    """Of one product of three parts, of which rank 0 is not there; and of the embedding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 3).to(dtype)

    factor = 0.5 + seed / 4 if scaling is None else scaling
    pairs = {
        f"attn.{name}": (draw(rank, HIDDEN), draw(out, rank), factor)
        for name, rank, out in zip("qkv", ranks, OUTS, strict=True)
        if rank
    }
    if lookup_rank:
        a, b = draw(VOCABULARY, lookup_rank), draw(HIDDEN, lookup_rank)
        pairs["embedding"] = (a, b, factor)
    return host_copy(pairs, f"seed {seed}")


def make_pool(
    adapters: Sequence[AdapterWeights],
    dtype: torch.dtype = torch.float32,
    *,
    is_transposed: bool,
    device: torch.device = CPU,
    max_stack_bytes: int | None = None,
) -> AdapterPool:
    """One slot for each."""
    parts = {
        **dict(EMBEDDING.targets("embedding")),
        **dict(QKV.targets("attn")),
        **dict(OTHER.targets("other")),
    }
    pool = AdapterPool(
        parts,
        num_slots=len(adapters),
        max_rank=16,
        dtype=dtype,
        device=device,
        is_transposed=is_transposed,
        max_stack_bytes=max_stack_bytes,
    )
    for slot, weights in enumerate(adapters):
        pool.load(AdapterSlot(slot), weights)
    return pool


def qkv(pool: AdapterPool) -> LinearSite:
    return pool.sites[QKV]


def embedding(pool: AdapterPool) -> EmbeddingSite:
    return pool.embedding_sites[EMBEDDING]


def plain_linear(weights: AdapterWeights, x: Tensor) -> Tensor:
    """What an adapter adds to the product of x, as PEFT computes it: float32 [rows, out]."""
    out = torch.zeros(x.shape[0], sum(OUTS))
    column = 0
    for name, size in zip("qkv", OUTS, strict=True):
        pair = weights.pairs.get(f"attn.{name}")
        if pair is not None:
            h = x.float() @ pair.a.float().T
            out[:, column : column + size] = pair.scaling * (h @ pair.b.float().T)
        column += size
    return out


def plain_embedding(weights: AdapterWeights, tokens: Tensor) -> Tensor:
    """The same of the embedding, whose output the model scales."""
    pair = weights.pairs.get("embedding")
    if pair is None:
        return torch.zeros(len(tokens), HIDDEN)
    vectors = pair.a.float()[tokens] @ pair.b.float().T
    return EMBEDDING.factor * pair.scaling * vectors
