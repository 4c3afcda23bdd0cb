"""Orders a vocabulary: most likely first; ties go to the lower token id.

Half-precision logits often tie, and torch does not define how `topk` and `sort` order ties: it
changes with their width and with the device. Here every token has a distinct key, so the first k
tokens are the same for any larger number of requested tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def order_keys(logits: Tensor) -> Tensor:
    """For float32 [rows, vocabulary], distinct int64 in the order of (logit, -id): the logit in the
    upper half, the id in the lower."""
    # Adding zero merges the two zeros. A float's bits are ordered, downwards if negative.
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ordered.to(torch.int64).bitwise_left_shift_(32).sub_(ids)


def likeliest(keys: Tensor, count: int) -> Tensor:
    """Ids, int64 [rows, count], of the first tokens of each row, in order."""
    return keys.topk(count, dim=-1).values.neg_().bitwise_and_(0xFFFFFFFF)
