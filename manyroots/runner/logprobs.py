"""Log-probabilities, of sampled tokens and of prompts: those of the model itself, before
temperature, penalties and cuts."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.step import TokenLogprobs

POSITIONS_AT_ONCE = 256
"""Prompt positions scored together: bounds the memory for logits over the vocabulary."""


def score(logits: Tensor, tokens: Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of logits: the given token's log-probability and rank, and the likeliest."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    top = logprobs.topk(max(1, *num_top), dim=-1) if num_top else None
    assert top is not None
    rows = zip(
        tokens.tolist(), own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(),
        top.values.tolist(), num_top, strict=True,
    )  # fmt: skip
    return [
        TokenLogprobs(token, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
        for token, logprob, rank, ids, values, count in rows
    ]
