"""Mistral: Llama without any biases, and in its first versions with a sliding window.

This version attends to everything, which is exact up to the window; see
`ModelSpec.max_exact_len`.
"""

from __future__ import annotations

from typing import Any

from manyroots.models.llama import Llama
from manyroots.models.spec import Traits
from manyroots.models.windows import of_every_layer, of_typed_layers


class Mistral(Llama):
    """Mistral 7B and its kin."""

    @staticmethod
    def traits(config: Any) -> Traits:
        return Traits(
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            # What transformers' AutoConfig makes of a Mistral whose config types its layers.
            sliding_window=(
                of_typed_layers(config)
                if config.model_type == "ministral"
                else of_every_layer(config)
            ),
        )
