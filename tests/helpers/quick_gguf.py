"""Has transformers read a GGUF file in a third of the time.

For each module of a model it builds the table of all tensor names again, and it reads a file's
metadata once for the config, once for the weights and once for the tokenizer.
`python -m tests.helpers.quick_gguf TEXT` runs a Python text so.
"""

from __future__ import annotations

import sys
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


if __name__ == "__main__":
    with quick_gguf():
        exec(sys.argv[1], {"__name__": "__main__"})
