"""The input of the layer that predicts tokens ahead (MTP).

    x = fc(norm(embedding of token i), norm(hidden state of token i - 1))

The decoder layer after it predicts token i + 1. An entry depends on tokens up to i, as in every
other layer. The first token has no hidden state before it; zeros stand for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyroots.layers.context import LayerContext
from manyroots.layers.linear import Linear
from manyroots.layers.norm import RMSNorm
from manyroots.layers.weights.fill import Fills


class PredictionInput:
    """Two norms and a product."""

    def __init__(self, context: LayerContext) -> None:
        hidden = context.hidden_size
        self._of_token, self._of_state = RMSNorm(hidden, context), RMSNorm(hidden, context)
        # Checkpoints whose other products are quantized have this one in plain numbers.
        own = context.unquantized
        self._product = Linear(2 * hidden, {"": hidden}, own, bias=False, side=None)
        self._kernels, self._dtype = context.kernels, context.dtype

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Of tokens with these embeddings, after tokens with these hidden states."""
        both = torch.cat((self._of_token.first(embedded), self._of_state.first(hidden)), dim=1)
        return self._product.of(both, None).finished(self._kernels).to(self._dtype)

    def products(self) -> Iterator[Linear]:
        yield self._product

    def weights(self, name: str) -> Fills:
        yield from self._of_token.weights(f"{name}.pre_fc_norm_embedding")
        yield from self._of_state.weights(f"{name}.pre_fc_norm_hidden")
        yield from self._product.weights(f"{name}.fc")
