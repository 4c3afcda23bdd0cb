"""Tokens by name: a segment is the beginning of an endless stream that its name decides.

The same name gives the same tokens everywhere, and a shorter piece begins a longer one, so that a
trace can say what prompts share without holding a single token. Names that differ share nothing.
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np

from manyroots.step import Int32s

VOCAB_SIZE = 2**17
"""Tokens of segments are below this; a power of two keeps them evenly spread."""
END_OF_TEXT = VOCAB_SIZE
"""Ends a reply; no segment holds it."""


@lru_cache(maxsize=4096)
def segment_tokens(name: str, length: int) -> Int32s:
    # A string seed goes through SHA-512, so it means the same in every process; and a longer
    # draw of whole 32-bit words begins with the shorter one.
    words = np.frombuffer(random.Random(name).randbytes(4 * length), "<u4")
    tokens = (words % VOCAB_SIZE).astype(np.int32)
    tokens.flags.writeable = False
    return tokens
