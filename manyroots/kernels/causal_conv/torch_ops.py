"""The causal convolution with torch's operators, all sequences at once: one product per filter tap.

Each sequence's state is placed in front of its tokens, so that a token and its predecessors are
neighbours in any step. Same signature as `reference.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.recurrent.rows import StateRows


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: StateRows,
    activation: str | None,
) -> Tensor:
    x = x.flatten(1)
    before = state[rows.units].masked_fill(rows.is_fresh[:, None, None], 0.0)
    if rows.is_decode:
        seen = torch.cat([before, x[:, :, None]], dim=2)
        state[rows.units] = seen[:, :, 1:]
        sums = (seen.float() * weight.float()).sum(2)
    else:
        sums = _prompts(x, weight, before, state, rows)
    if bias is not None:
        sums = sums + bias.float()
    return (F.silu(sums) if activation == "silu" else sums).to(x.dtype)


def _prompts(x: Tensor, weight: Tensor, before: Tensor, state: Tensor, rows: StateRows) -> Tensor:
    num_before = weight.shape[1] - 1
    num_tokens, num_seqs = x.shape[0], len(rows.units)
    counts = rows.starts.diff().long()
    sequence = torch.repeat_interleave(
        torch.arange(num_seqs, device=x.device), counts, output_size=num_tokens
    )
    # For each token, the index of its inputs among all sequences' states and tokens.
    at = torch.arange(num_tokens, device=x.device) + (sequence + 1) * num_before
    first = rows.starts[:-1].long() + torch.arange(num_seqs, device=x.device) * num_before
    offsets = torch.arange(num_before, device=x.device)
    joined = x.new_empty(num_tokens + num_seqs * num_before, x.shape[1])
    joined[at] = x
    joined[first[:, None] + offsets] = before.transpose(1, 2)
    last = first + counts  # the newest `num_before` inputs start there
    state[rows.units] = joined[last[:, None] + offsets].transpose(1, 2)
    wide, filters = joined.float(), weight.float()
    sums = wide[at] * filters[:, -1]
    for back in range(1, num_before + 1):
        sums = sums + wide[at - back] * filters[:, num_before - back]
    return sums
