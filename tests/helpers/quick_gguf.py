"""Has transformers read a GGUF file in a third of the time.

For each module of a model it builds the table of all tensor names again, and it reads a file's
metadata once for the config and once for the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import gguf


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Both are made once in here."""
    with (
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
    ):
        yield
