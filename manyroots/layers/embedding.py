"""Tokens to vectors at the bottom of a model, vectors to logits at its top.

The two share one weight where the model says so. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """One row per token of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def slots(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensor for the embedding `name` goes."""
        yield f"{name}.weight", self.weight


class LmHead:
    """Scores of the tokens `rows` of the vocabulary. `tied_to` lends its weight to tied models."""

    def __init__(
        self,
        rows: slice,
        hidden_size: int,
        *,
        tied_to: Embedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._is_tied = tied_to is not None
        self.weight = (
            torch.empty(rows.stop - rows.start, hidden_size, dtype=dtype, device=device)
            if tied_to is None
            else tied_to.weight[rows]
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits in float32, where samplers compute."""
        return F.linear(hidden, self.weight).float()

    def slots(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensor for the head `name` goes; nowhere if it is tied."""
        if not self._is_tied:
            yield f"{name}.weight", self.weight
