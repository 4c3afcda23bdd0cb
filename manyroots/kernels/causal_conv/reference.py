"""A causal convolution of each channel with the few tokens before; one sequence and token at a
time.

y[t] = activation(bias + sum over j of weight[:, j] * x[t - (width - 1) + j])

The state holds the inputs before a step's tokens: the last `width - 1`, oldest first.
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
    """`x` [num_tokens, channels], or [num_tokens, groups, channels of each] of a wider product ->
    [num_tokens, channels]; `weight` [channels, width]; `state` [units, channels, width - 1], read
    and written in place. `activation`: "silu" or None."""
    x = x.flatten(1)
    y = torch.empty_like(x)
    starts = rows.starts.tolist()
    for i, unit in enumerate(rows.units.tolist()):
        before = state[unit].zero_() if rows.is_fresh[i] else state[unit]
        for t in range(starts[i], starts[i + 1]):
            seen = torch.cat([before, x[t, :, None]], dim=1)
            before = seen[:, 1:]
            sums = (seen.float() * weight.float()).sum(1)
            if bias is not None:
                sums = sums + bias.float()
            y[t] = F.silu(sums) if activation == "silu" else sums
        state[unit] = before
    return y
