"""Hyper-connections with torch's operators, in float32.

The residual is n streams [tokens, n, hidden]. Weights are products of all of a token's streams,
normalised. The mixing matrix is made doubly stochastic by dividing columns and rows by their sums
in turn (Sinkhorn-Knopp).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.hyper.inputs import HyperRead, HyperWeights, ReadNorm
from manyroots.kernels.norm.reference import rms_norm


def read_streams(streams: Tensor, weights: HyperWeights, norm: ReadNorm | None = None) -> HyperRead:
    """What a half of a layer reads of streams [tokens, n, hidden], normalised if it has a norm."""
    count = streams.shape[1]
    numbers = _numbers(streams, weights)
    sizes = [count, count, count * count]
    pre, post, mix = (
        part * scale + base
        for part, scale, base in zip(
            torch.split(numbers, sizes, dim=1),
            weights.scale,
            torch.split(weights.base, sizes),
            strict=True,
        )
    )
    eps = weights.eps
    matrix = mix.view(-1, count, count).softmax(2) + eps
    matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
    for _ in range(weights.num_iterations - 1):
        matrix = matrix / (matrix.sum(2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
    rows = _joined(streams, torch.sigmoid(pre) + eps)
    if norm is not None:
        rows = rms_norm(rows, norm.weight, norm.eps)
    return HyperRead(rows, 2 * torch.sigmoid(post), matrix)


def write_streams(
    streams: Tensor, output: Tensor, read: HyperRead, also: Tensor | None = None
) -> Tensor:
    """The streams after a half of a layer gave `output` [tokens, hidden], or partial sums [splits,
    tokens, hidden], and `also` likewise."""
    mixed = torch.matmul(read.mix.transpose(1, 2), streams.float())
    given = added_up(output.float())
    if also is not None:
        given = given + added_up(also.float())
    return (read.post[..., None] * given[:, None] + mixed).to(streams.dtype)


def added_up(sums: Tensor) -> Tensor:
    """Partial sums [splits, tokens, hidden] added up; whole rows as they are."""
    return sums if sums.dim() == 2 else sums.sum(0)


def join_streams(streams: Tensor, weights: HyperWeights) -> Tensor:
    """[tokens, hidden]: what the model's last norm reads."""
    numbers = _numbers(streams, weights) * weights.scale + weights.base
    return _joined(streams, torch.sigmoid(numbers) + weights.eps)


def _numbers(streams: Tensor, weights: HyperWeights) -> Tensor:
    flat = streams.flatten(1).float()
    normed = flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + weights.norm_eps)
    return F.linear(normed, weights.product)


def _joined(streams: Tensor, shares: Tensor) -> Tensor:
    return (shares[..., None] * streams).sum(1).to(streams.dtype)
