"""Hyper-connections on a CPU: a few operators for each half of a layer. Same signatures as
`reference.py`; streams are mixed in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.hyper.inputs import HyperRead
from manyroots.kernels.hyper.reference import join_streams, read_streams

__all__ = ["join_streams", "read_streams", "write_streams"]


def write_streams(streams: Tensor, output: Tensor, read: HyperRead) -> Tensor:
    """The streams after a half of a layer gave `output` [tokens, hidden]."""
    dtype = streams.dtype
    mixed = torch.matmul(read.mix.to(dtype).transpose(1, 2), streams)
    return read.post.to(dtype)[..., None] * output.to(dtype)[:, None] + mixed
