"""A matrix that lies in memory twice: as rows, and in the order in which a CPU's library reads it.

A library that gets rows puts them in its own order at every product, which is a fifth of a product
of 32 rows and half of one of 4. oneDNN with Arm's Compute Library can be given that order once.
Measured on a Neoverse-N1 (float32, one thread, eight matrices of 576 x 3072 in turn, GFLOP/s):

    rows of x       1      2     32    192   1024   2048
    by rows       8.5    5.9   23.7   33.6   34.8   33.7
    by columns    6.4    6.7   28.5   34.4   36.4   36.5
    packed        5.1   10.1   31.6   35.9   35.2   33.9

So one row is multiplied with rows, and more of them with what is packed. On x86 nothing is packed:
it was not measured there.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 32
"""What it is packed for; the form is the same for any number."""
PIECE = 192
"""Rows of x that are multiplied at once, where there are many: 5% less time of 2240 rows, since
what comes out fits into memory that is at hand, and fresh pages need not be fetched."""


@dataclass(frozen=True, slots=True)
class KeptTwice:
    """[out, in], float32, and the same in the form of a library."""

    rows: Tensor
    packed: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The numbers themselves."""
        return self.rows


@dataclass(frozen=True, slots=True)
class PackedMatrix(KeptTwice):
    """In the order of oneDNN."""

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b."""
        if x.shape[0] == 1:
            return F.linear(x, self.rows, bias)
        if x.shape[0] < 2 * PIECE:
            return self._product(x, bias)
        return torch.cat([self._product(piece, bias) for piece in torch.split(x, PIECE)])

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return product


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine's library has a form of its own that is faster."""
    if device.type != "cpu" or dtype is not torch.float32 or platform.machine() != "aarch64":
        return False
    # Asked by name: not every torch has it.
    has_acl = getattr(torch.backends.mkldnn, "is_acl_available", lambda: False)
    return bool(has_acl()) and _has_operators()


def _has_operators() -> bool:
    """torch's compiler uses these two; they are not promised to anybody else."""
    operators = torch.ops.mkldnn
    return hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")


def pack(rows: Tensor) -> PackedMatrix:
    """With what is packed beside it; to be made again when `rows` change."""
    return PackedMatrix(rows, torch.ops.mkldnn._reorder_linear_weight(rows, _ROWS))
