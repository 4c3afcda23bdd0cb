"""On a CPU the plain way is fast enough."""

from manyroots.kernels.recurrent.reference import prepare

__all__ = ["prepare"]
