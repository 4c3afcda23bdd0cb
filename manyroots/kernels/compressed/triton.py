"""Windows and compressed groups of tokens on a GPU, in Triton. Same signatures as
`reference.py`."""

from manyroots.kernels.compressed.triton_attend import attend_rows
from manyroots.kernels.compressed.triton_index import choose_entries
from manyroots.kernels.compressed.triton_rows import (
    compress,
    normed_write,
    rotate_last,
    write_rows,
)

__all__ = [
    "attend_rows",
    "choose_entries",
    "compress",
    "normed_write",
    "rotate_last",
    "write_rows",
]
