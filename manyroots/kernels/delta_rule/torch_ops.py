"""The gated delta rule with torch's operators; used on CPUs.

Same signature as `reference.py`. Decoding sequences take one step together. A prompt is computed in
chunks. Within a chunk, each token's correction depends on those of earlier tokens, which is a
triangular system. It is solved once for all chunks and heads; then each chunk needs a few products:

    L[i, j] = beta_i exp(G_i - G_j) k_i . k_j   for j < i, with G the sums of g within the chunk
    (1 + L) W = beta v,  (1 + L) U = beta exp(G) k
    N = W - U S                      what tokens write, given the state S before the chunk
    out = exp(G) q S + (exp(G_i - G_j) q_i . k_j)[j <= i] N
    S' = exp(G_last) S + (exp(G_last - G) k)^T N

A batch of small products is many times slower if the second factor is a transposed view (measured
with OpenBLAS). Such factors are therefore copied into transposed form first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.delta_rule.inputs import DeltaGates
from manyroots.kernels.delta_rule.reference import EPS
from manyroots.kernels.recurrent.chunks import (
    chunks_by_group,
    chunks_by_head,
    decay_between,
    in_order,
)
from manyroots.kernels.recurrent.rows import StateRows

CHUNK = 64
CHANNEL_CHUNK = 16
"""With a decay per channel, each pair of a chunk's tokens has one decay per channel."""


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows
) -> Tensor:
    """Values [tokens, heads, value_dim] that queries read, in the dtype of v. See `reference.py`
    for the shapes."""
    decay, beta, a_log, dt_bias = gates.all
    v, decay, beta = v.flatten(1, 2), decay.flatten(1), beta.flatten(1)
    q = _unit(q.float()).mul_(q.shape[2] ** -0.5)
    k = _unit(k.float())
    g = F.softplus(decay.float() + dt_bias.float()).mul_(-a_log.float().exp())
    beta = beta.float().sigmoid()
    out = torch.empty(v.shape, dtype=v.dtype)
    units = rows.units
    kept = state[units]
    kept.masked_fill_(rows.is_fresh[:, None, None, None], 0)
    count = rows.num_decodes
    if count:
        one = slice(0, count)
        out[one] = _single(q[one], k[one], v[one].float(), g[one], beta[one], kept[one])
    starts = rows.starts.tolist()
    for seq in range(count, len(rows.units)):
        own = slice(starts[seq], starts[seq + 1])
        out[own] = _chunks(q[own], k[own], v[own].float(), g[own], beta[own], kept[seq])
    state[units] = kept
    return out


def channel_delta(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows
) -> Tensor:
    """The same with a decay for each channel of a key. See `reference.py` for the shapes."""
    decay, beta, a_log, dt_bias = gates.all
    q = _unit(q.float()).mul_(q.shape[2] ** -0.5)
    k = _unit(k.float())
    g = F.softplus(decay.float() + dt_bias.float()).mul_(-a_log.float().exp()[:, None])
    beta = beta.float().sigmoid()
    out = torch.empty(v.shape, dtype=v.dtype)
    kept = state[rows.units]
    kept.masked_fill_(rows.is_fresh[:, None, None, None], 0)
    count = rows.num_decodes
    if count:
        one = slice(0, count)
        kept[one] *= g[one].exp()[..., None]
        read = torch.matmul(k[one, :, None], kept[one])
        written = (v[one, :, None].float() - read).mul_(beta[one][..., None, None])
        kept[one].addcmul_(k[one][..., None], written)
        out[one] = torch.matmul(q[one, :, None], kept[one])[:, :, 0].to(out.dtype)
    starts = rows.starts.tolist()
    for seq in range(count, len(rows.units)):
        for first in range(starts[seq], starts[seq + 1], CHANNEL_CHUNK):
            own = slice(first, min(first + CHANNEL_CHUNK, starts[seq + 1]))
            parts = [x[own].transpose(0, 1) for x in (q, k, v.float(), g, beta)]
            out[own] = _channel_chunk(parts, kept[seq]).transpose(0, 1).to(out.dtype)
    state[rows.units] = kept
    return out


def _channel_chunk(parts: Sequence[Tensor], kept: Tensor) -> Tensor:
    """Takes a chunk's q, k, v, g and beta, all [heads, tokens, ...], and updates its state
    `kept` [heads, key_dim, value_dim]. Decays of a pair of tokens are differences, which cannot
    overflow."""
    q, k, v, g, beta = parts
    sums = g.cumsum(1)
    later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool).triu(1)[..., None]
    between = (sums[:, :, None] - sums[:, None]).masked_fill_(later, -torch.inf).exp_()
    keys = between * k[:, None]
    system = torch.einsum("hid,hijd->hij", k, keys) * beta[..., None]
    wanted = (v - torch.matmul(k * sums.exp(), kept)) * beta[..., None]
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    scores = torch.einsum("hid,hijd->hij", q, keys)
    out = torch.matmul(q * sums.exp(), kept) + torch.matmul(scores, written)
    last = sums[:, -1:]
    writing = (k * (last - sums).exp()).transpose(1, 2)
    kept.mul_(last.transpose(1, 2).exp()).add_(torch.matmul(writing, written))
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _single(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, kept: Tensor) -> Tensor:
    """One token of each of n sequences; updates their states `kept` [n, heads, key_dim,
    value_dim]."""
    each = v.shape[1] // q.shape[1]
    if each > 1:
        q, k = q.repeat_interleave(each, dim=1), k.repeat_interleave(each, dim=1)
    kept *= g.exp()[..., None, None]
    read = torch.matmul(k[:, :, None], kept)
    written = (v[:, :, None] - read).mul_(beta[..., None, None])
    kept.addcmul_(k[..., None], written)
    return torch.matmul(q[:, :, None], kept)[:, :, 0]


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, kept: Tensor) -> Tensor:
    """All tokens of one sequence; updates its state `kept` [heads, key_dim, value_dim]."""
    num_tokens, value_dim = v.shape[0], v.shape[2]
    groups, key_dim = q.shape[1:]
    size = min(CHUNK, num_tokens)
    q, k = chunks_by_group(q, size), chunks_by_group(k, size)
    v, beta = chunks_by_head(v, size, groups), chunks_by_head(beta, size, groups)[..., None]
    g = chunks_by_head(g, size, groups).cumsum(-1)
    between, since = decay_between(g), g.exp()[..., None]
    # The solver reads only below the diagonal.
    transposed = k.transpose(-1, -2).contiguous()
    system = (between * torch.matmul(k, transposed)).mul_(beta)
    both = torch.cat((v, k * since), dim=-1).mul_(beta)
    both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    wanted, reading = (x.contiguous() for x in both.split([value_dim, key_dim], dim=-1))
    scores = between.mul_(torch.matmul(q, transposed))
    queries = q * since
    writing = (k * (g[..., -1:] - g).exp_()[..., None]).transpose(-1, -2)
    through = g[..., -1, None, None].exp()
    matrix = kept.view(groups, -1, key_dim, value_dim)
    out = torch.empty_like(v)
    for chunk in range(v.shape[2]):
        written = wanted[:, :, chunk] - torch.matmul(reading[:, :, chunk], matrix)
        out[:, :, chunk] = torch.matmul(queries[:, :, chunk], matrix)
        out[:, :, chunk] += torch.matmul(scores[:, :, chunk], written)
        matrix = matrix * through[:, :, chunk] + torch.matmul(writing[:, :, chunk], written)
    kept.copy_(matrix.view(kept.shape))
    return in_order(out, num_tokens)
