"""Whether the base weights that an adapter's file repeats are those of the model that serves it.

PEFT saves the embedding and the head whole beside an adapter that changes them, and uses what it
saved. Here the model's own are used, so both must be the same. They may be rounded otherwise, or
quantized: then all rows differ alike. Rows of tokens that were added or trained differ by far more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyroots.errors import AdapterError

_ROWS_AT_ONCE = 8192
_ROUNDED = 0.05
"""Of a row's size: what half precision rounds off is a tenth of it."""
_FAR_MORE = 4.0
_ANOTHER_MODEL = 0.3
"""As far as this no quantization goes."""
_MAX_NAMED = 6


class BaseRows(NamedTuple):
    """A rank's rows of the embedding or the head, one per token."""

    weight: Tensor
    first: int
    """The token of the first row."""


def check_copy(name: str, copy: Tensor, own: BaseRows) -> None:
    """`copy`: the whole weight as the file has it, under this name."""
    differences = _differences(copy, own)
    usual = differences.median()
    if not usual <= _ANOTHER_MODEL:
        raise AdapterError(
            f"{name!r} repeats base weights that are not those of this model. Serve the adapter "
            "with the model that it was trained on."
        )
    limit = (usual * _FAR_MORE).clamp(min=_ROUNDED)
    changed = (~(differences <= limit)).nonzero().flatten() + own.first
    if len(changed):
        shown = ", ".join(str(token) for token in changed[:_MAX_NAMED].tolist())
        rest = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
        raise AdapterError(
            f"{name!r} repeats base weights that differ from this model's for the tokens {shown}"
            f"{rest}: they were added or trained, which is not served. Merge the adapter into the "
            "model that it was trained on and serve that; if these tokens do not matter, save the "
            "adapter without: save_pretrained(..., save_embedding_layers=False)."
        )


def _differences(copy: Tensor, own: BaseRows) -> Tensor:
    """Of each row, by its size."""
    num_rows = len(own.weight)
    apart, sizes = torch.empty(num_rows), torch.empty(num_rows)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, num_rows))
        ours = own.weight[rows].to("cpu", torch.float32)
        theirs = copy[own.first + rows.start : own.first + rows.stop].float()
        sizes[rows] = torch.linalg.vector_norm(ours, dim=1)
        apart[rows] = torch.linalg.vector_norm(theirs - ours, dim=1)
    # A row of zeros, which nothing uses, has a size all the same.
    return apart / sizes.clamp(min=1e-3 * sizes.mean().item() + 1e-12)
