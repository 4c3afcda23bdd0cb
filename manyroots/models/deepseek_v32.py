"""DeepSeek-V3.2: the layers of V3, in which queries choose the tokens that they see by an index."""

from __future__ import annotations

from manyroots.errors import ModelError
from manyroots.layers.spec import TokenIndexSpec
from manyroots.models.architecture import Architecture, ConfigType, Values, fill_types
from manyroots.models.deepseek import LATENT_DEFAULTS, finish, latent_model, sigmoid_experts
from manyroots.models.glm4_moe_lite import DENSE, SPARSE, block_types
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.prediction import PredictionNames

_KEY_NORM_EPS = 1e-6
_INDEXED = "indexed_attention"


def describe(reader: ConfigReader) -> ModelSpec:
    """DeepSeek-V3.2 and V3.2-Exp."""
    index = token_index(reader, is_interleaved=False)
    return indexed_model(reader, [index] * reader.text.num_hidden_layers)


def indexed_model(reader: ConfigReader, indexes: list[TokenIndexSpec]) -> ModelSpec:
    """Latent attention with these indexes, and experts after dense layers."""
    text = reader.text
    kinds = block_types(text.mlp_layer_types, text.num_hidden_layers)
    dense, sparse = reader.dense(bias=False), sigmoid_experts(reader)
    feed_forward = [dense if kind == DENSE else sparse for kind in kinds]
    return latent_model(reader, feed_forward, is_interleaved=True, indexes=indexes)


def token_index(reader: ConfigReader, *, is_interleaved: bool) -> TokenIndexSpec:
    """The config's index."""
    text = reader.text
    if text.index_head_dim < text.qk_rope_head_dim:
        raise ModelError(
            f"the model's index_head_dim is {text.index_head_dim}, and it rotates "
            f"{text.qk_rope_head_dim} numbers of each head (qk_rope_head_dim); the first must be "
            "at least the second. Check its config.json."
        )
    if text.q_lora_rank is None:
        raise ModelError(
            "the model's q_lora_rank is null, and its index reads the latent of that size. Check "
            "its config.json."
        )
    return TokenIndexSpec(
        num_heads=text.index_n_heads,
        head_dim=text.index_head_dim,
        num_chosen=text.index_topk,
        is_interleaved=is_interleaved,
        norm_eps=_KEY_NORM_EPS,
    )


def finish_indexed(values: Values) -> None:
    """The first layers are dense unless the file says which."""
    finish(values)
    if values["mlp_layer_types"] is None:
        count = values["num_hidden_layers"]
        num_dense = min(values["first_k_dense_replace"], count)
        values["mlp_layer_types"] = [DENSE] * num_dense + [SPARSE] * (count - num_dense)
    fill_types(values, lambda layer: _INDEXED)


INDEXED_DEFAULTS: Values = LATENT_DEFAULTS | {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "eos_token_id": 1,
    "mlp_bias": False,
    "mlp_layer_types": None,
    "layer_types": None,
    "index_topk": 2048,
    "index_head_dim": 128,
}
ARCHITECTURES = {
    "DeepseekV32ForCausalLM": Architecture(
        {
            "deepseek_v32": ConfigType(
                INDEXED_DEFAULTS
                | {
                    "vocab_size": 129280,
                    "hidden_size": 7168,
                    "intermediate_size": 18432,
                    "num_hidden_layers": 61,
                    "num_attention_heads": 128,
                    "num_key_value_heads": 128,
                    "n_group": 8,
                    "topk_group": 4,
                    "max_position_embeddings": 163840,
                    "index_n_heads": 64,
                },
                finish_indexed,
                other_names={"n_routed_experts": "num_local_experts"},
            )
        },
        describe,
        prediction=PredictionNames.NUMBERED,
    ),
}
