"""Numbers of rows that steps of single tokens are padded to.

Graphs are captured for these, and kernels are cut for them, so that a step of another number of
rows needs no other kernel.
"""

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64)
SIZE_STEP = 32
"""Above the small sizes, they are so far apart."""


def row_size(num_rows: int) -> int:
    """The least size for so many rows."""
    for size in SMALL_SIZES:
        if num_rows <= size:
            return size
    return -(-num_rows // SIZE_STEP) * SIZE_STEP
