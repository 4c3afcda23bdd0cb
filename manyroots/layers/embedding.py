"""Tokens to vectors at the bottom of a model, vectors to logits at its top.

The two share one weight if the model ties them. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.lora_ops.sites import EmbeddingSite, LoraRows
from manyroots.kernels.scaled import plain
from manyroots.layers.context import LayerContext
from manyroots.layers.linear import Linear
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.layers.weights.weight import Weight
from manyroots.lora.targets import Side, TargetKind
from manyroots.store.adapter_base import BaseRows
from manyroots.store.adapter_sites import LoraSite, SitePart


class Embedding:
    """One row per token of the vocabulary; every rank has all rows."""

    def __init__(
        self,
        vocab_size: int,
        context: LayerContext,
        *,
        scale: float,
        rounds_scale: bool,
    ) -> None:
        self.weight = context.empty(vocab_size, context.hidden_size)
        # Rounded where the checkpoint's own code rounds it.
        self._scale = torch.tensor(scale, dtype=context.dtype).item() if rounds_scale else scale
        self._kernels = context.kernels
        self.site = LoraSite(
            TargetKind.EMBEDDING, vocab_size, {"": context.hidden_size}, factor=self._scale
        )
        self.pooled: EmbeddingSite | None = None
        """The offsets of adapters' weights for it; None in a model without adapters."""

    def __call__(self, tokens: Tensor, step: Step) -> Tensor:
        rows = F.embedding(tokens, self.weight)
        if self._scale != 1.0:
            rows *= self._scale
        if step.lora is not None and self.pooled is not None:
            self._kernels.lora_ops.add_embedding(rows, tokens, self.pooled, step.lora)
        return rows

    def weights(self, name: str) -> Fills:
        """Destination of a checkpoint's tensor for the embedding `name`."""
        yield f"{name}.weight", Fill(self.weight)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of the embedding `name` that adapters may change."""
        yield from self.site.targets(name)


class LmHead:
    """Logits of a rank's tokens of the vocabulary. Tied models share the weight of `tied_to`.

    An adapter of one never affects the other, tied or not: it adds to a product, and the shared
    weight is unchanged.
    """

    def __init__(
        self,
        vocab_size: int,
        context: LayerContext,
        *,
        tied_to: Embedding | None,
        factor: float,
        cap: float,
    ) -> None:
        """`factor`: multiplies logits. `cap`: logits l become cap * tanh(l / cap); 0: no cap."""
        rows = context.shard.part(vocab_size)
        self._first = rows.start
        self._factor, self._cap = factor, cap
        self._vocab_size, self._shard, self._kernels = vocab_size, context.shard, context.kernels
        self._is_tied = tied_to is not None
        own = context.unquantized
        self.product = Linear(
            own.hidden_size, {"": rows.stop - rows.start}, own, bias=False, side=Side.OUTPUT
        )
        if tied_to is not None:
            self.product.weight = Weight(tied_to.weight[rows], own.dtype, own.format)

    def __call__(self, hidden: Tensor, rows: LoraRows | None) -> Tensor:
        """Logits [num_rows, vocab_size] in the dtype of `hidden`; `rows` are the adapters of these
        rows, not of all tokens of the step."""
        product = self.product(hidden, Step(ropes=(), memories=(), lora=rows))
        own = product.finished(self._kernels).to(hidden.dtype)
        if self._factor != 1.0:
            own = own * self._factor
        if self._cap:
            own = torch.tanh(own / self._cap) * self._cap
        return self._shard.join(own, self._vocab_size)

    def weights(self, name: str) -> Fills:
        """Destination of a checkpoint's tensor for the head `name`; none if it is tied."""
        if not self._is_tied:
            yield from self.product.weights(name)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of the head `name` that adapters may change."""
        yield from self.product.lora_parts(name)

    def base_rows(self) -> BaseRows:
        """The rank's rows, which are never quantized."""
        return BaseRows(plain(self.product.weight.data, self.product.weight.dtype), self._first)
