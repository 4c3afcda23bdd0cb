"""Draws tokens after top-k, top-p and min-p.

In: float32 logits with a finite maximum, parameters by row, one number in [0, 1) per row. Out: a
token per row: the first, by id, at which the running sum of the kept tokens' weights exceeds number
x total.

Weights are integers (`exact.py`), so sums are exact in any order. A row's token depends only on the
row, not on its neighbours' cuts or on which method below finds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.kernels.sampling.exact import (
    LEAST,
    LOG2_E,
    MANTISSA_BITS,
    POWERS,
    ROUNDER,
    scale_bits,
)
from manyroots.kernels.sampling.likeliest import likeliest, order_keys

WIDTHS = (64, 1024, 16384)
"""How many of the most likely tokens are read before all are. A top-k has its own width; a top-p
tries the second width, which nearly always holds what it keeps."""

AnyFloats = npt.NDArray[np.float32 | np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Parameters of some rows. A temperature is above 0; a `top_k` of 0 and a `top_p` of 1 keep all
    tokens."""

    temperature: AnyFloats
    top_k: Ints
    top_p: AnyFloats
    min_p: AnyFloats

    def of(self, rows: Ints) -> Cuts:
        return Cuts(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw(logits: Tensor, cuts: Cuts, numbers: AnyFloats) -> Ints:
    """One token for each row."""
    vocab = logits.shape[-1]
    has_k = (cuts.top_k > 0) & (cuts.top_k < vocab)
    looks_at = np.where(has_k, cuts.top_k, np.where(cuts.top_p < 1.0, WIDTHS[1], 0))
    tokens = np.empty(len(looks_at), np.int64)
    left = np.arange(len(looks_at))
    for width in (0, *(width for width in WIDTHS if width < vocab), vocab):
        now = left[looks_at[left] <= width] if width < vocab else left
        if not len(now):
            continue
        mine = logits[torch.from_numpy(now).to(logits.device)]
        if width:
            tokens[now] = _draw_cut(mine, cuts.of(now), numbers[now], has_k[now], width)
        else:
            tokens[now] = _draw_any(mine, cuts.of(now), numbers[now])
        left = np.setdiff1d(left, now[tokens[now] >= 0], assume_unique=True)
    return tokens


def _draw_any(logits: Tensor, cuts: Cuts, numbers: AnyFloats) -> Ints:
    """Draw from the whole vocabulary, which needs no order."""
    scale = 2.0 ** scale_bits(logits.shape[-1])
    weights = _weights(logits, logits.amax(-1, keepdim=True), cuts.temperature, scale)
    return _pick(_drop_small(weights, cuts.min_p, scale), numbers)[:, 0].cpu().numpy()


def _draw_cut(
    logits: Tensor, cuts: Cuts, numbers: AnyFloats, has_k: npt.NDArray[np.bool_], width: int
) -> Ints:
    """Draw from the `width` most likely tokens; -1 for rows whose top-p keeps more."""
    device, scale = logits.device, 2.0 ** scale_bits(logits.shape[-1])
    ids = likeliest(order_keys(logits), width)
    best = logits.gather(-1, ids[:, :1])
    weights = _weights(logits.gather(-1, ids), best, cuts.temperature, scale)
    top_k = _column(np.where(has_k, cuts.top_k, width), device)
    weights.masked_fill_(torch.arange(width, device=device) >= top_k, 0)
    sums = weights.cumsum(-1)
    total = sums[:, -1:].clone()
    open_rows = np.flatnonzero(~has_k)
    if len(open_rows) and width < logits.shape[-1]:
        at = torch.from_numpy(open_rows).to(device)
        every = _weights(logits[at], best[at], cuts.temperature[open_rows], scale)
        total[at] = every.sum(-1, keepdim=True)
    # A token is kept if the sum before it does not reach top-p.
    limit = (_column(cuts.top_p.astype(np.float64), device) * total.to(torch.float64)).ceil().long()
    limit = torch.where(_column(cuts.top_p >= 1.0, device), total, limit).clamp(min=1)
    limit = torch.minimum(limit, total)
    holds_all = (sums[:, -1:] >= limit)[:, 0].cpu().numpy()
    weights.masked_fill_(sums - weights >= limit, 0)
    picked = _pick_by_id(ids, _drop_small(weights, cuts.min_p, scale), numbers, logits.shape[-1])
    return np.where(holds_all, picked[:, 0].cpu().numpy(), -1)


def _weights(logits: Tensor, best: Tensor, temperature: AnyFloats, scale: float) -> Tensor:
    """`exact.weights` of some rows. Factors of two change no rounding, so the polynomial is
    evaluated already scaled."""
    per_logit = _column(np.float32(LOG2_E) / temperature.astype(np.float32), logits.device)
    exponents = (logits - best).mul_(per_logit).clamp_(min=LEAST)
    rounded = exponents + ROUNDER
    nearest = rounded - ROUNDER
    rest = exponents.sub_(nearest)
    power = torch.mul(rest, POWERS[-1] * scale, out=nearest)
    for factor in POWERS[-2:0:-1]:
        power.add_(factor * scale).mul_(rest)
    power.add_(POWERS[0] * scale)
    power.view(torch.int32).add_(rounded.view(torch.int32).bitwise_left_shift_(MANTISSA_BITS))
    return power.to(torch.int64)


def _drop_small(weights: Tensor, min_p: AnyFloats, scale: float) -> Tensor:
    floor = np.ceil(min_p.astype(np.float64) * scale).astype(np.int64)
    return weights.masked_fill_(weights < _column(floor, weights.device), 0)


def _pick(weights: Tensor, numbers: AnyFloats) -> Tensor:
    """For each row [rows, 1], the first index whose running sum exceeds number x total."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:].contiguous()
    targets = (_column(numbers, weights.device) * total.to(torch.float64)).to(torch.int64)
    # The product may have been rounded up to the total, or past it.
    return torch.searchsorted(sums, torch.minimum(targets, total - 1), right=True)


def _pick_by_id(ids: Tensor, weights: Tensor, numbers: AnyFloats, vocab: int) -> Tensor:
    """`_pick` among some tokens, in the order of their ids; returns the token."""
    if ids.shape[-1] == vocab:
        return _pick(torch.empty_like(weights).scatter_(-1, ids, weights), numbers)
    ids, order = ids.sort(dim=-1)
    return ids.gather(-1, _pick(weights.gather(-1, order), numbers))


def _column(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]
