"""Arrays between processes, as (type, bytes): of the few types that messages are made of.

What msgspec calls for what it does not know itself. The type travels with the bytes, and is not
read from annotations: what those look like at run time depends on the version of numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in (np.int32, np.int64, np.bool_)}


def flatten(value: Any) -> tuple[str, bytes]:
    if isinstance(value, np.ndarray) and value.dtype.str in DTYPES and value.ndim == 1:
        return value.dtype.str, value.tobytes()
    what = f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()
    raise TypeError(f"{what} can't cross between processes")


def restore(_: Any, value: tuple[str, bytes]) -> Any:
    """Read-only, as messages are."""
    dtype, data = value
    return np.frombuffer(data, DTYPES[dtype])
