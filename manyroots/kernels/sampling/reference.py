"""From logits to tokens, naive: the rule that the fast kernel keeps.

Draw number i of a sequence depends on (seed, i) alone: two rounds of splitmix64's finalizer. The
token is the first whose running sum of probabilities exceeds draw x total.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens, int32 [rows], and whether each row's largest logit was finite.

    Rows whose `temperature` (float32) is 0 take the likeliest token, the first of equals; others
    draw with `seeds` and `indices` (int64) from all of the vocabulary.
    """
    tokens, finite = [], []
    for row in range(logits.shape[0]):
        values = logits[row].float().cpu()
        best = values.max()
        finite.append(bool(torch.isfinite(best)))
        heat = float(temperature[row])
        if heat <= 0.0 or not finite[-1]:
            tokens.append(int(values.argmax()))
            continue
        weights = torch.exp((values - best) / heat).double().numpy()
        sums = np.cumsum(weights)
        target = _draw(int(seeds[row]), int(indices[row])) * sums[-1]
        picked = int(np.searchsorted(sums, target, side="right"))
        tokens.append(min(picked, int(np.flatnonzero(weights)[-1])))
    device = logits.device
    return (
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(finite, device=device),
    )


def _draw(seed: int, index: int) -> float:
    state = (_mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    return (_mix(state) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z %= 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)
