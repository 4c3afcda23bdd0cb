"""A few small operators of torch, which a graph can capture, once per step."""

from manyroots.kernels.recurrent.reference import prepare

__all__ = ["prepare"]
