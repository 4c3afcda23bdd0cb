"""GLM-4.7-Flash: latent attention, and experts chosen by sigmoids after a dense layer."""

from __future__ import annotations

from manyroots.errors import ModelError
from manyroots.models.architecture import Architecture, ConfigType, Values
from manyroots.models.deepseek import (
    LATENT_DEFAULTS,
    finish,
    latent_model,
    sigmoid_experts,
)
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.prediction import PredictionNames

DENSE, SPARSE = "dense", "sparse"


def describe(reader: ConfigReader) -> ModelSpec:
    """GLM-4.7-Flash."""
    text = reader.text
    kinds = block_types(text.mlp_layer_types, text.num_hidden_layers)
    dense, sparse = reader.dense(bias=False), sigmoid_experts(reader)
    feed_forward = [dense if kind == DENSE else sparse for kind in kinds]
    return latent_model(reader, feed_forward, is_interleaved=bool(text.rope_interleave))


def block_types(kinds: list[str], count: int) -> list[str]:
    """The kind of each layer's feed-forward block; refuses unknown kinds."""
    if len(kinds) != count or set(kinds) - {DENSE, SPARSE}:
        raise ModelError(
            f"the model has {count} layers, and its mlp_layer_types {len(kinds)} entries "
            f"({', '.join(sorted(set(kinds)))[:200]}); there must be 'dense' or 'sparse' for each. "
            "Check its config.json."
        )
    return kinds


def _finish(values: Values) -> None:
    finish(values)
    if values["mlp_layer_types"] is None:
        count = values["num_hidden_layers"]
        values["mlp_layer_types"] = [DENSE] * min(1, count) + [SPARSE] * (count - 1)


ARCHITECTURES = {
    "Glm4MoeLiteForCausalLM": Architecture(
        {
            "glm4_moe_lite": ConfigType(
                LATENT_DEFAULTS
                | {
                    "vocab_size": 154880,
                    "hidden_size": 2048,
                    "intermediate_size": 10240,
                    "moe_intermediate_size": 1536,
                    "num_hidden_layers": 47,
                    "num_attention_heads": 20,
                    "num_key_value_heads": 20,
                    "n_shared_experts": 1,
                    "n_routed_experts": 64,
                    "routed_scaling_factor": 1.8,
                    "q_lora_rank": 768,
                    "v_head_dim": 256,
                    "qk_nope_head_dim": 192,
                    "n_group": 1,
                    "topk_group": 1,
                    "num_experts_per_tok": 4,
                    "norm_topk_prob": True,
                    "max_position_embeddings": 202752,
                    "rms_norm_eps": 1e-5,
                    "eos_token_id": 1,
                    "rope_interleave": True,
                    "mlp_layer_types": None,
                },
                _finish,
                other_names={
                    "n_routed_experts": "num_local_experts",
                    "qk_rope_head_dim": "head_dim",
                },
            )
        },
        describe,
        prediction=PredictionNames.NUMBERED,
    ),
}
