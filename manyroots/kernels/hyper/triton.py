"""The plain way: a few operators for each half of a layer."""

from manyroots.kernels.hyper.reference import join_streams, read_streams, write_streams

__all__ = ["join_streams", "read_streams", "write_streams"]
