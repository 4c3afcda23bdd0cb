"""There are no Triton kernels for this yet: models that need it take the reference set."""

from manyroots.kernels.compressed.reference import (
    attend_rows,
    choose_entries,
    compress,
    rotate_last,
    write_entries,
    write_rows,
)

__all__ = [
    "attend_rows",
    "choose_entries",
    "compress",
    "rotate_last",
    "write_entries",
    "write_rows",
]
