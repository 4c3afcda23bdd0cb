"""Adapters, naive: one token at a time, in float32.

Obviously right and slow; every other file of this folder that computes has the same signatures
and is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from manyroots.kernels.lora_sites.batch import AdapterBatch
from manyroots.kernels.lora_sites.weights import LowRank, Site, SlotWeights


def add_linear(y: Tensor, x: Tensor, site: Site, batch: AdapterBatch) -> None:
    """Add each token's adapter to y [num_tokens, out] = W x, in place; x is [num_tokens, in]."""
    for token, weights in _tokens(batch):
        low = weights.linears.get(site)
        if low is not None:
            _add(y[token], low.a.float() @ x[token].float(), low)


def add_embedding(y: Tensor, tokens: Tensor, site: Site, batch: AdapterBatch) -> None:
    """Add each token's adapter to its embedding y [num_tokens, hidden], in place."""
    for token, weights in _tokens(batch):
        low = weights.lookups.get(site)
        if low is not None:
            _add(y[token], low.a[int(tokens[token])].float(), low)


def _tokens(batch: AdapterBatch) -> Iterator[tuple[int, SlotWeights]]:
    for run in batch.runs:
        for token in range(run.tokens.start, run.tokens.stop):
            yield token, run.weights


def _add(y: Tensor, h: Tensor, low: LowRank) -> None:
    for part in low.parts:
        y[part.columns] += (h[part.ranks] @ part.b.float()).to(y.dtype)
