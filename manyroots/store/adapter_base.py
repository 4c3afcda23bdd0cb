"""Checks that the base weights repeated in an adapter's file are those of the serving model.

PEFT saves the whole embedding and head with an adapter that changes them, and uses the saved ones.
Here the model's own are used, so both must be equal. They may be rounded differently, or quantized:
then all rows differ by a similar amount. Rows of tokens that were added or trained differ by far
more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyroots.errors import AdapterError

_ROWS_AT_ONCE = 8192
_ROUNDED = 0.05
"""As a share of a row's size; half precision rounds off a tenth of this."""
_FAR_MORE = 4.0
_ANOTHER_MODEL = 0.3
"""No quantization differs by this much."""
_MAX_NAMED = 6


class BaseRows(NamedTuple):
    """A rank's rows of the embedding or the head, one per token."""

    weight: Tensor
    first: int
    """The token of the first row."""


def check_copy(name: str, copy: Tensor, own: BaseRows) -> None:
    """`copy`: the whole weight in the file, under this name."""
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
    """The difference of each row, relative to its size."""
    num_rows = len(own.weight)
    apart, sizes = torch.empty(num_rows), torch.empty(num_rows)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, num_rows))
        ours = own.weight[rows].to("cpu", torch.float32)
        theirs = copy[own.first + rows.start : own.first + rows.stop].float()
        sizes[rows] = torch.linalg.vector_norm(ours, dim=1)
        apart[rows] = torch.linalg.vector_norm(theirs - ours, dim=1)
    # An unused row of zeros still needs a size.
    return apart / sizes.clamp(min=1e-3 * sizes.mean().item() + 1e-12)
