"""Torch's operators, which run on a GPU as they do on a CPU, and can be captured."""

from manyroots.kernels.causal_conv.torch_ops import conv

__all__ = ["conv"]
