"""How weights of products are kept, where not in the model's dtype.

Told once, around the making of a decoder (`weights_kept_as`), because every layer makes its own
products and none should hand on what it does not look at. Embeddings, heads, routers, norms and
adapters stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """All products in FP8."""

    is_stored: bool
    """Whether the checkpoint has them so; else they are rounded as they are loaded."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: a scale for each row, or for all."""


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Experts in MXFP4, and nothing else."""

    is_stored: bool
    """As in `Fp8Format`."""


WeightFormat = Fp8Format | Mxfp4Format
_format: ContextVar[WeightFormat | None] = ContextVar("weight_format", default=None)


@contextmanager
def weights_kept_as(format: WeightFormat | None) -> Iterator[None]:
    """Of products that are made inside; None: numbers in the model's dtype."""
    token = _format.set(format)
    try:
        yield
    finally:
        _format.reset(token)


def fp8_format() -> Fp8Format | None:
    """Of all products that are made here and now."""
    kept = _format.get()
    return kept if isinstance(kept, Fp8Format) else None


def mxfp4_format() -> Mxfp4Format | None:
    """The same of experts."""
    kept = _format.get()
    return kept if isinstance(kept, Mxfp4Format) else None
