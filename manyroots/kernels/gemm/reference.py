"""Reference of a few rows times a large weight, with the adapters' shrink of the same input."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Rows
from manyroots.kernels.lora_ops.reference import shrink
from manyroots.kernels.lora_ops.sites import LinearSite, LoraRows, LoraTerm
from manyroots.kernels.norm.deferred import DeferredRMSNorm
from manyroots.kernels.scaled import Matrix, plain

ROWS_AT_ONCE: int | None = None
"""Most rows that a block of products takes at once; None: all."""


def is_for(num_rows: int, weight: Matrix, *, has_adapters: bool = False) -> bool:
    """Whether `linear` supports this product."""
    return True


def form_for(num_rows: int, weight: Matrix, keeps_values: bool) -> None:
    """The form in which `linear` reads rows: unchanged."""


def linear(
    x: Tensor | Fp8Rows | DeferredRMSNorm,
    weight: Matrix,
    site: LinearSite | None = None,
    rows: LoraRows | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, LoraTerm | None]:
    """Multiply x [rows, k] with weight [n, k] transposed and add a bias [n]. Returns partial sums
    [splits, rows, n] in float32 or one product in x's dtype and, given a site, its adapters' shrink
    of x."""
    if isinstance(x, DeferredRMSNorm):
        # Not rounded in between: the fused kernel divides the product, not the activations.
        x = x.values.float() * x.factors
    if isinstance(x, Fp8Rows):
        x = x.plain() if x.values is None else x.values
    out = (x.float() @ plain(weight, torch.float32).float().T).unsqueeze(0)
    if bias is not None:
        out = out + bias.float()
    if site is None or rows is None:
        return out, None
    return out, shrink(x, site, rows)
