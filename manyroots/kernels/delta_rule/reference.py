"""Reference of the gated delta rule: one token at a time, in float32.

A head's state is a matrix [key_dim, value_dim] that maps keys to values. Each token decays it, then
moves what its key reads towards its value:

S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   out = S^T q
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.delta_rule.inputs import DeltaGates
from manyroots.kernels.recurrent.rows import StateRows

EPS = 1e-6
"""Added to the lengths of queries and keys before dividing by them."""


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows
) -> Tensor:
    """Values [tokens, heads, value_dim] that queries read, in the dtype of v.

    q and k [tokens, key_heads, key_dim] are normalised here. Several consecutive heads share a key
    head: v is [tokens, key_heads, heads of each, value_dim], `decay` and `beta` [tokens, key_heads,
    heads of each], `a_log` and `dt_bias` [heads]. `state` [units, heads, key_dim, value_dim] is
    float32.
    """
    decay, beta, a_log, dt_bias = gates.all
    v, decay, beta = v.flatten(1, 2), decay.flatten(1), beta.flatten(1)
    q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], dim=1) for x in (q, k))
    g = -a_log.float().exp() * F.softplus(decay.float() + dt_bias.float())
    return _tokens(q, k, v, g[..., None], beta, state, rows)


def channel_delta(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows
) -> Tensor:
    """The same with a decay for each channel of a key (Kimi Linear): q, k and `decay` [tokens,
    heads, key_dim], v [tokens, heads, value_dim], beta [tokens, heads], `a_log` [heads] and
    `dt_bias` [heads, key_dim]."""
    decay, beta, a_log, dt_bias = gates.all
    g = -a_log.float().exp()[:, None] * F.softplus(decay.float() + dt_bias.float())
    return _tokens(q, k, v, g, beta, state, rows)


def _tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: StateRows
) -> Tensor:
    """g [tokens, heads, key_dim or 1]"""
    dim = q.shape[2]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    q, k, beta = _unit(q.float()), _unit(k.float()), beta.float().sigmoid()
    starts, fresh = rows.starts.tolist(), rows.is_fresh.tolist()
    for seq, unit in enumerate(rows.units.tolist()):
        kept = torch.zeros_like(state[unit]) if fresh[seq] else state[unit].clone()
        for t in range(starts[seq], starts[seq + 1]):
            kept = kept * g[t].exp()[..., None]
            read = torch.einsum("hkv,hk->hv", kept, k[t])
            written = beta[t, :, None] * (v[t] - read)
            kept = kept + torch.einsum("hk,hv->hkv", k[t], written)
            out[t] = (torch.einsum("hkv,hk->hv", kept, q[t]) * dim**-0.5).to(out.dtype)
        state[unit] = kept
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
