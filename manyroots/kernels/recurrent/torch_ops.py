"""On a CPU the reference is fast enough."""

from manyroots.kernels.recurrent.reference import prepare

__all__ = ["prepare"]
