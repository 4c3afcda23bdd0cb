"""Page-locked memory, taken from the system before anybody waits for it.

Locking takes about half a millisecond per MiB, longer than reading an adapter's file. Torch keeps
what it has locked and gives it out again, so locking some at start is enough: the first adapters
that are read find theirs.
"""

from __future__ import annotations

import torch

MAX_BYTES = 2**30
"""Most that is locked ahead of time, unless a single piece is larger."""


def lock_ahead(piece_bytes: int, most: int) -> int:
    """Have up to `most` pieces of this size ready; gives how many."""
    rounded = 1 << max(piece_bytes - 1, 1).bit_length()  # torch's own, by powers of two
    count = min(most, max(1, MAX_BYTES // rounded))
    pieces = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
    return len(pieces)
