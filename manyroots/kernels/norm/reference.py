"""Reference of residual add and root-mean-square normalisation, step by step in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows, in_fp8
from manyroots.kernels.lora_ops.reference import expanded
from manyroots.kernels.lora_ops.sites import LoraTerm
from manyroots.kernels.norm.deferred import DeferredRMSNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype)


def sum_rms_norm(sums: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`rms_norm` of rows [rows, n] or of the sum of partial sums [splits, rows, n], in `dtype`.
    Rows need not be adjacent."""
    return rms_norm(_sum(sums), weight, eps).to(dtype)


def add_rms_norm(
    residual: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    lora: LoraTerm | None = None,
    post: Tensor | None = None,
    factor: float = 1.0,
    form: Fp8Form | None = None,
    also: Tensor | None = None,
) -> Tensor | Fp8Rows:
    """Add `delta` ([rows, n], or partial sums [splits, rows, n]), `also` likewise and the
    adapters' part to `residual` in place. Returns the sum, normalised, in the `form` that the next
    product reads. With `post`, the addend is itself normalised and scaled by it first. The addend
    is multiplied with `factor`."""
    added = _whole(delta, lora, also)
    if post is not None:
        added = rms_norm(added, post, eps)
    normed = rms_norm(_add(residual, added * factor), weight, eps).to(residual.dtype)
    return normed if form is None else in_fp8(normed, form)


def add_norm(
    residual: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    lora: LoraTerm,
    form: Fp8Form | None = None,
    also: Tensor | None = None,
) -> DeferredRMSNorm:
    """`add_rms_norm` without its division. Up to 64 rows."""
    total = _add(residual, _whole(delta, lora, also))
    scaled = (total * weight.float()).to(residual.dtype)
    in_form = None if form is None else in_fp8(scaled, form)
    return DeferredRMSNorm(scaled, total.square().sum(1, keepdim=True), eps, in_form)


def _whole(delta: Tensor, lora: LoraTerm | None, also: Tensor | None) -> Tensor:
    """Products plus their adapters' part, in float32."""
    total = _sum(delta) if also is None else _sum(delta) + _sum(also)
    return total if lora is None else total + expanded(lora)


def _sum(sums: Tensor) -> Tensor:
    return (sums if sums.dim() == 2 else sums.float().sum(0)).float()


def _add(residual: Tensor, added: Tensor) -> Tensor:
    """The sum before `residual` rounds it: the fused kernel never reads that back."""
    total = residual.float() + added
    residual.copy_(total)
    return total
