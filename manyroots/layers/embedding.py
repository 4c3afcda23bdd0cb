"""Tokens to vectors at the bottom of a model, vectors to logits at its top.

The two share one weight where the model says so. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.lora.batch import AdapterBatch
from manyroots.layers.lora import add_embedding, add_linear
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_sites import LoraSite, SitePart


class Embedding:
    """One row per token of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.site = LoraSite(TargetKind.EMBEDDING, vocab_size, {"": hidden_size})

    def __call__(self, tokens: Tensor, adapters: AdapterBatch | None) -> Tensor:
        return add_embedding(F.embedding(tokens, self.weight), tokens, self.site, adapters)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensor for the embedding `name` goes."""
        yield f"{name}.weight", self.weight

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """What adapters may change of the embedding `name`."""
        yield from self.site.targets(name)


class LmHead:
    """Scores of the tokens `rows` of the vocabulary. `tied_to` lends its weight to tied models.

    An adapter of one of the two is never the other's, tied or not: it adds to a product, and the
    weight they share stays as it is.
    """

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
        self.site = LoraSite(TargetKind.LINEAR, hidden_size, {"": rows.stop - rows.start})

    def __call__(self, hidden: Tensor, adapters: AdapterBatch | None) -> Tensor:
        """Logits in float32, where samplers compute."""
        return add_linear(F.linear(hidden, self.weight), hidden, self.site, adapters).float()

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensor for the head `name` goes; nowhere if it is tied."""
        if not self._is_tied:
            yield f"{name}.weight", self.weight

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """What adapters may change of the head `name`."""
        yield from self.site.targets(name)
