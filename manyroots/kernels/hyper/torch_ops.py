"""Hyper-connections on a CPU: a few operators for each half of a layer. Same signatures as
`reference.py`; streams are mixed in the model's dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from manyroots.kernels.hyper import reference
from manyroots.kernels.hyper.inputs import HyperRead, HyperWeights, ReadNorm
from manyroots.kernels.hyper.reference import added_up, join_streams
from manyroots.kernels.norm.torch_ops import rms_norm

__all__ = ["join_streams", "read_streams", "write_streams"]


def read_streams(streams: Tensor, weights: HyperWeights, norm: ReadNorm | None = None) -> HyperRead:
    """What a half of a layer reads of streams [tokens, n, hidden], normalised if it has a norm."""
    read = reference.read_streams(streams, weights)
    if norm is None:
        return read
    return replace(read, rows=rms_norm(read.rows, norm.weight, norm.eps))


def write_streams(
    streams: Tensor, output: Tensor, read: HyperRead, also: Tensor | None = None
) -> Tensor:
    """The streams after a half of a layer gave `output` [tokens, hidden], or partial sums [splits,
    tokens, hidden], and `also` likewise."""
    dtype = streams.dtype
    mixed = torch.matmul(read.mix.to(dtype).transpose(1, 2), streams)
    given = added_up(output)
    if also is not None:
        given = given + added_up(also)
    return read.post.to(dtype)[..., None] * given.to(dtype)[:, None] + mixed
