"""Qwen3, dense: Llama whose queries and keys are normalised per head before rotation."""

from __future__ import annotations

from typing import Any

from manyroots.models.llama import Llama
from manyroots.models.spec import Traits
from manyroots.models.windows import of_typed_layers


class Qwen3(Llama):
    """Qwen3, dense."""

    @staticmethod
    def traits(config: Any) -> Traits:
        return Traits(
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            mlp_bias=False,
            qk_norm=True,
            sliding_window=of_typed_layers(config),
        )
