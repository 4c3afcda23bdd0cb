"""Reference of the scan of Mamba-2: one token at a time, in float32.

A head's state is a matrix [head_dim, state_dim], and a head's decay one number per token:

S = exp(dt a) S + dt x b^T;   out = S c + d x
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.recurrent.rows import StateRows


def scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    rows: StateRows,
    least_step: float = 0.0,
) -> Tensor:
    """Returns [tokens, heads, head_dim] for x of that shape, in its dtype.

    `dt` [tokens, heads] is a raw product: the step is softplus(dt + dt_bias), at least
    `least_step`, and a is -exp(a_log). `a_log`, `dt_bias` and `d` are [heads]. b and c are [tokens,
    groups, state_dim]; equally many consecutive heads share a group. `state` [units, heads,
    head_dim, state_dim] is float32.
    """
    heads = x.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    each = heads // b.shape[1]
    b, c = (s.float().repeat_interleave(each, dim=1) for s in (b, c))
    steps = F.softplus(dt.float() + dt_bias.float()).clamp(min=least_step)
    decays = torch.exp(-a_log.float().exp() * steps)
    starts, fresh = rows.starts.tolist(), rows.is_fresh.tolist()
    for seq, unit in enumerate(rows.units.tolist()):
        kept = torch.zeros_like(state[unit]) if fresh[seq] else state[unit].clone()
        for t in range(starts[seq], starts[seq + 1]):
            value = x[t].float()
            added = torch.einsum("hp,hn->hpn", steps[t, :, None] * value, b[t])
            kept = decays[t, :, None, None] * kept + added
            read = torch.einsum("hpn,hn->hp", kept, c[t]) + d.float()[:, None] * value
            out[t] = read.to(out.dtype)
        state[unit] = kept
    return out
