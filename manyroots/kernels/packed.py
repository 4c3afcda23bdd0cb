"""A matrix stored twice: as rows, and in the order that a CPU's library reads.

A library that receives rows reorders them at every product, which takes a fifth of a product of 32
rows and half of one of 4. oneDNN accepts the reordered form, on Arm with Arm's Compute Library.
Measured on a Neoverse-N1 (float32, one thread, eight matrices of 576 x 3072 in turn, GFLOP/s):

    rows of x       1      2     32    192   1024   2048
    by rows       8.5    5.9   23.7   33.6   34.8   33.7
    by columns    6.4    6.7   28.5   34.4   36.4   36.5
    packed        5.1   10.1   31.6   35.9   35.2   33.9

The same on a Xeon of 2.5 GHz with AVX-512, in milliseconds of processor time:

    rows of x       1      2      4      8     64    384   1024   2048
    by columns   0.64   1.26   1.32   1.45   3.85   11.6   29.9   52.4
    packed       0.80   0.83   0.82   0.96   2.19   10.5   27.7   56.0
    in pieces    0.92   0.93   0.97   1.13   2.65   13.0   34.2   73.6

One row is therefore multiplied with the matrix as it lies, and several with the packed form. On Arm
the matrix lies by rows, and many rows of x are multiplied in pieces. Elsewhere it lies by columns.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IS_ARM = platform.machine() == "aarch64"
_ROWS = 32
"""Rows of x for packing; the form is the same for any number."""
PIECE = 192
"""Rows of x that are multiplied at once on Arm, if there are many. 2240 rows take 5% less time,
because the output fits into memory that is already mapped."""


@dataclass(frozen=True, slots=True)
class KeptTwice:
    """[out, in], float32, by rows or by columns, and the same in a library's form."""

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
        if not IS_ARM or x.shape[0] < 2 * PIECE:
            return self._product(x, bias)
        return torch.cat([self._product(piece, bias) for piece in torch.split(x, PIECE)])

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return product


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine's library has a faster form of its own."""
    if device.type != "cpu" or dtype is not torch.float32:
        return False
    # Looked up by name: not every torch has it.
    name = "is_acl_available" if IS_ARM else "is_available"
    has_library = getattr(torch.backends.mkldnn, name, lambda: False)
    return bool(has_library()) and _has_operators()


def _has_operators() -> bool:
    """Internal operators of torch's compiler, without a promise of stability."""
    operators = torch.ops.mkldnn
    return hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")


def pack(rows: Tensor) -> PackedMatrix:
    """Makes the packed form; call it again after `rows` change."""
    return PackedMatrix(rows, torch.ops.mkldnn._reorder_linear_weight(rows.contiguous(), _ROWS))
