"""A matrix stored twice: as rows, and in the order that a CPU's library reads.

A library that receives rows reorders them at every product, which takes a fifth of a product of 32
rows and half of one of 4. oneDNN with Arm's Compute Library accepts the reordered form. Measured on
a Neoverse-N1 (float32, one thread, eight matrices of 576 x 3072 in turn, GFLOP/s):

    rows of x       1      2     32    192   1024   2048
    by rows       8.5    5.9   23.7   33.6   34.8   33.7
    by columns    6.4    6.7   28.5   34.4   36.4   36.5
    packed        5.1   10.1   31.6   35.9   35.2   33.9

One row is therefore multiplied with the rows, and several with the packed form. On x86 nothing is
packed: it was not measured there.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 32
"""Rows of x for packing; the form is the same for any number."""
PIECE = 192
"""Rows of x that are multiplied at once, if there are many. 2240 rows take 5% less time, because
the output fits into memory that is already mapped."""


@dataclass(frozen=True, slots=True)
class KeptTwice:
    """[out, in], float32, and the same in a library's form."""

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
    """Whether this machine's library has a faster form of its own."""
    if device.type != "cpu" or dtype is not torch.float32 or platform.machine() != "aarch64":
        return False
    # Looked up by name: not every torch has it.
    has_acl = getattr(torch.backends.mkldnn, "is_acl_available", lambda: False)
    return bool(has_acl()) and _has_operators()


def _has_operators() -> bool:
    """Internal operators of torch's compiler, without a promise of stability."""
    operators = torch.ops.mkldnn
    return hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")


def pack(rows: Tensor) -> PackedMatrix:
    """Makes the packed form; call it again after `rows` change."""
    return PackedMatrix(rows, torch.ops.mkldnn._reorder_linear_weight(rows, _ROWS))
