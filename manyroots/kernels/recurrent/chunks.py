"""Cuts a sequence into chunks of equal size, for the recurrent kernels of a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def in_chunks(x: Tensor, size: int) -> Tensor:
    """[chunks, size, ...] of x [tokens, ...]. The last chunk is filled up with zeros: tokens that
    change nothing."""
    rest = -x.shape[0] % size
    if rest:
        x = torch.cat((x, x.new_zeros(rest, *x.shape[1:])))
    x = x.contiguous()
    return x.view(-1, size, *x.shape[1:])


def chunks_by_group(x: Tensor, size: int) -> Tensor:
    """[groups, 1, chunks, size, n] of x [tokens, groups, n]."""
    return in_chunks(x, size).permute(2, 0, 1, 3)[:, None]


def chunks_by_head(x: Tensor, size: int, groups: int) -> Tensor:
    """[groups, heads of each, chunks, size, ...] of x [tokens, heads, ...]."""
    x = in_chunks(x, size)
    x = x.view(*x.shape[:2], groups, -1, *x.shape[3:])
    return x.permute(2, 3, 0, 1, *range(4, x.ndim)).contiguous()


def decay_between(sums: Tensor) -> Tensor:
    """exp(sums_i - sums_j) for j <= i and 0 elsewhere, [..., size, size] of [..., size]."""
    size = sums.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill_(later, -torch.inf).exp_()


def in_order(x: Tensor, num_tokens: int) -> Tensor:
    """[tokens, heads, n] of [groups, heads of each, chunks, size, n]."""
    return x.permute(2, 3, 0, 1, 4).flatten(2, 3).flatten(0, 1)[:num_tokens]
