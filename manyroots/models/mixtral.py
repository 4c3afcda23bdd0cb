"""Mixtral: Mistral whose feed-forward blocks are experts.

Published checkpoints call the block `block_sparse_moe` and an expert's products w1, w3 and w2.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import (
    Architecture,
    ConfigType,
    GgufForm,
    Tensors,
    Values,
    fill_kv_heads,
    renamed,
)
from manyroots.models.llama import unpaired
from manyroots.models.mistral import DEFAULTS
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.windows import of_every_layer

_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


def describe(reader: ConfigReader) -> ModelSpec:
    """Mixtral 8x7B and 8x22B."""
    block = reader.experts(
        reader.text.num_local_experts,
        intermediate_size=reader.text.intermediate_size,
        scoring=Scoring.SOFTMAX_RENORMALISED,
    )
    return reader.model(
        [
            LayerSpec(
                mixers=(
                    reader.attention(qkv_bias=False, o_bias=False, qk_norm=False, window=window),
                ),
                feed_forward=block,
            )
            for window in of_every_layer(reader.text)
        ]
    )


def translate(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Experts one by one, with the common names."""
    return per_expert(renamed(_NAMES)(weights))


def _of_gguf(file: GGUFFile, values: Values) -> Values:
    return {
        "num_local_experts": file.whole("llama.expert_count"),
        "num_experts_per_tok": file.whole("llama.expert_used_count"),
    }


ARCHITECTURES = {
    "MixtralForCausalLM": Architecture(
        {
            "mixtral": ConfigType(
                DEFAULTS
                | {
                    "rms_norm_eps": 1e-5,
                    "sliding_window": None,
                    "num_experts_per_tok": 2,
                    "num_local_experts": 8,
                },
                fill_kv_heads,
                other_names={"num_local_experts": "num_experts"},
                theta=1_000_000.0,
            )
        },
        describe,
        translate,
        # Files of Mixtral have the architecture llama; their experts distinguish them.
        gguf=GgufForm("llama", "mixtral", _of_gguf, restore=unpaired, has_experts=True),
    ),
}
