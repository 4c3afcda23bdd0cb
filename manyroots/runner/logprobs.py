"""Log-probabilities, of sampled tokens and of prompts: those of the model itself, before
temperature, penalties and cuts. Ranks and the likeliest are by `likeliest.py`'s order."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.sampling.likeliest import likeliest, order_keys
from manyroots.kernels.tolerances import TOLERANCES
from manyroots.step import TokenLogprobs

POSITIONS_AT_ONCE = 256
"""Prompt positions scored together: bounds the memory for logits over the vocabulary."""


def score(logits: Tensor, tokens: Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of logits: the given token's log-probability and rank, and the likeliest."""
    logprobs = torch.log_softmax(logits, dim=-1)
    mine = tokens[:, None]
    keys = order_keys(logits)
    ranks = (keys > keys.gather(-1, mine)).sum(-1, dtype=torch.int32) + 1
    width = min(max(num_top, default=0), logits.shape[-1])
    top = likeliest(keys, width) if width else mine[:, :0]
    rows = zip(
        tokens.tolist(), logprobs.gather(-1, mine)[:, 0].tolist(), ranks.tolist(), top.tolist(),
        logprobs.gather(-1, top).tolist(), num_top, strict=True,
    )  # fmt: skip
    return [
        TokenLogprobs(token, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
        for token, logprob, rank, ids, values, count in rows
    ]


def same_within(dtype: torch.dtype) -> float:
    """How far log-probabilities of the same tokens may differ between two ways to compute them."""
    return TOLERANCES["self_check", dtype].atol
