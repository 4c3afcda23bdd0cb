"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and nowhere else."""

from __future__ import annotations

from typing import Any

from manyroots.models.llama import Llama
from manyroots.models.spec import Traits
from manyroots.models.windows import of_typed_layers


class Qwen2(Llama):
    """Qwen2 and Qwen2.5, dense."""

    @staticmethod
    def traits(config: Any) -> Traits:
        return Traits(
            qkv_bias=True,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            sliding_window=of_typed_layers(config),
        )
