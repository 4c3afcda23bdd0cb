"""Reference of the scan of Mamba-2: one token at a time, in float32.

A head's state is a matrix [head_dim, state_dim], and a head's decay one number per token:

S = exp(dt a) S + dt x b^T;   out = S c + d x
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.mamba.inputs import MambaSteps
from manyroots.kernels.recurrent.rows import StateRows


def scan(
    x: Tensor, b: Tensor, c: Tensor, steps: MambaSteps, state: Tensor, rows: StateRows
) -> Tensor:
    """Returns [tokens, heads, head_dim] for x of that shape, in its dtype. b and c are [tokens,
    groups, state_dim]; equally many consecutive heads share a group. `state` [units, heads,
    head_dim, state_dim] is float32."""
    heads = x.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    each = heads // b.shape[1]
    b, c = (s.float().repeat_interleave(each, dim=1) for s in (b, c))
    raw = steps.dt.float() + steps.dt_bias.float()
    dt = F.softplus(raw).clamp(min=steps.least_step)
    decays = torch.exp(-steps.a_log.float().exp() * dt)
    starts, fresh = rows.starts.tolist(), rows.is_fresh.tolist()
    for seq, unit in enumerate(rows.units.tolist()):
        kept = torch.zeros_like(state[unit]) if fresh[seq] else state[unit].clone()
        for t in range(starts[seq], starts[seq + 1]):
            value = x[t].float()
            added = torch.einsum("hp,hn->hpn", dt[t, :, None] * value, b[t])
            kept = decays[t, :, None, None] * kept + added
            read = torch.einsum("hpn,hn->hp", kept, c[t]) + steps.d.float()[:, None] * value
            out[t] = read.to(out.dtype)
        state[unit] = kept
    return out
