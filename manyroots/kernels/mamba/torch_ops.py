"""The scan of Mamba-2 with torch's operators; used on CPUs.

Same signature as `reference.py`. Decoding sequences take one step together. A prompt is computed in
chunks: within a chunk as attention with decaying weights, between chunks through the state.

    out = exp(A) c S + (exp(A_i - A_j) dt_j c_i . b_j)[j <= i] x + d x    with A the sums of dt a
    S'  = exp(A_last) S + (exp(A_last - A) dt x)^T b
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.mamba.inputs import MambaSteps
from manyroots.kernels.recurrent.chunks import (
    chunks_by_group,
    chunks_by_head,
    decay_between,
    in_order,
)
from manyroots.kernels.recurrent.rows import StateRows

CHUNK = 64


def scan(
    x: Tensor, b: Tensor, c: Tensor, steps: MambaSteps, state: Tensor, rows: StateRows
) -> Tensor:
    """Returns [tokens, heads, head_dim] for x of that shape, in its dtype. See `reference.py` for
    the others."""
    values, b, c = x.float(), b.float(), c.float()
    dt = F.softplus(steps.dt.float() + steps.dt_bias.float()).clamp_(min=steps.least_step)
    decays = dt * -steps.a_log.float().exp()
    out = values * steps.d.float()[:, None]
    units = rows.units
    kept = state[units]
    kept.masked_fill_(rows.is_fresh[:, None, None, None], 0)
    values = values * dt[..., None]
    count = rows.num_decodes
    if count:
        one = slice(0, count)
        out[one] += _single(values[one], decays[one], b[one], c[one], kept[one])
    starts = rows.starts.tolist()
    for seq in range(count, len(rows.units)):
        own = slice(starts[seq], starts[seq + 1])
        out[own] += _chunks(values[own], decays[own], b[own], c[own], kept[seq])
    state[units] = kept
    return out.to(x.dtype)


def _single(x: Tensor, decays: Tensor, b: Tensor, c: Tensor, kept: Tensor) -> Tensor:
    """One token of each of n sequences; updates their states `kept` [n, heads, head_dim,
    state_dim]."""
    each = x.shape[1] // b.shape[1]
    if each > 1:
        b, c = b.repeat_interleave(each, dim=1), c.repeat_interleave(each, dim=1)
    kept *= decays.exp()[..., None, None]
    kept.addcmul_(x[..., None], b[:, :, None])
    return torch.matmul(kept, c[..., None])[..., 0]


def _chunks(x: Tensor, decays: Tensor, b: Tensor, c: Tensor, kept: Tensor) -> Tensor:
    """All tokens of one sequence; updates its state `kept` [heads, head_dim, state_dim]."""
    num_tokens, _, dim = x.shape
    groups, state_dim = b.shape[1:]
    size = min(CHUNK, num_tokens)
    b, c = chunks_by_group(b, size), chunks_by_group(c, size)
    transposed = b.transpose(-1, -2).contiguous()
    x, sums = chunks_by_head(x, size, groups), chunks_by_head(decays, size, groups).cumsum(-1)
    weights = decay_between(sums).mul_(torch.matmul(c, transposed))
    out = torch.matmul(weights, x)
    reading = c * sums.exp()[..., None]
    added = torch.matmul(transposed, x * (sums[..., -1:] - sums).exp_()[..., None])
    through = sums[..., -1, None, None].exp()
    # Transposed, [state_dim, head_dim]: see `delta_rule/torch_ops.py` on second factors.
    matrix = kept.view(groups, -1, dim, state_dim).transpose(-1, -2).contiguous()
    for chunk in range(x.shape[2]):
        out[:, :, chunk] += torch.matmul(reading[:, :, chunk], matrix)
        matrix = matrix * through[:, :, chunk] + added[:, :, chunk]
    kept.copy_(matrix.transpose(-1, -2).reshape(kept.shape))
    return in_order(out, num_tokens)
