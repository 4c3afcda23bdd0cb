"""The index in Triton. The rest has no kernels yet: models that compress groups of tokens take the
reference set."""

from manyroots.kernels.compressed.reference import (
    attend_rows,
    compress,
    rotate_last,
    write_entries,
    write_rows,
)
from manyroots.kernels.compressed.triton_index import choose_entries

__all__ = [
    "attend_rows",
    "choose_entries",
    "compress",
    "rotate_last",
    "write_entries",
    "write_rows",
]
