"""Residual add and RMS normalisation with torch's operators; used on CPUs.

Same signatures as `reference.py`. Products on a CPU arrive complete, so nothing calls `add_norm`,
which exists for adapters that are not yet expanded.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Form
from manyroots.kernels.lora_ops.sites import LoraTerm
from manyroots.kernels.norm.reference import add_norm

__all__ = ["add_norm", "add_rms_norm", "rms_norm", "sum_rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    if x.dtype is weight.dtype is torch.float32:
        return _rms_norm(x, weight, eps)
    if weight.dtype is x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Fewer passes than torch's own norm, which consists of six operators: two thirds of its time
    (Neoverse-N1, 1 to 192 rows of 576)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean = torch.addcmul(_number(eps), length, length, value=1 / x.shape[-1])
    return (x * mean.rsqrt_()).mul_(weight)


@lru_cache(maxsize=8)
def _number(value: float) -> Tensor:
    """A tensor of the number: every operator would make one from a plain number."""
    return torch.tensor([value])


def sum_rms_norm(sums: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`rms_norm` of rows [rows, n] or of the sum of partial sums [splits, rows, n], in `dtype`.
    Rows need not be adjacent."""
    return rms_norm(sums if sums.dim() == 2 else sums.sum(0), weight, eps).to(dtype)


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
) -> Tensor:
    """Add `delta` ([rows, n], or partial sums [splits, rows, n]) and `also` likewise to `residual`
    in place. Returns the sum, normalised. `post`: the weight of a norm that is applied to the
    addend first. The addend is multiplied with `factor`."""
    if lora is not None or form is not None:
        raise TypeError("a CPU's products come with their adapters in them, and read plain rows")
    total = delta if delta.dim() == 2 else delta.sum(0)
    if also is not None:
        total = total + (also if also.dim() == 2 else also.sum(0))
    if post is not None:
        total = rms_norm(total, post, eps)
    residual.add_(total.to(residual.dtype), alpha=factor)
    return rms_norm(residual, weight, eps)
