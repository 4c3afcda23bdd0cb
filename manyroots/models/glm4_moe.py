"""GLM-4.5 and GLM-4.6: experts chosen by sigmoids, with a shared block, after a few dense layers.

Half of each head is rotated. Larger models normalise queries and keys per head. Each expert has a
number that affects the choice but not the weight.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.spec import BlockSpec, DenseSpec, LayerSpec, SharedSpec
from manyroots.models.architecture import (
    COMMON,
    Architecture,
    ConfigType,
    GgufForm,
    Tensors,
    Values,
    renamed,
)
from manyroots.models.fields import FLAG
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.weights.prediction import PredictionNames

_CORRECTION = ".mlp.gate.e_score_correction_bias"
_SIGMOID = 2
"""GGUF's number of the router's function."""


def describe(reader: ConfigReader) -> ModelSpec:
    """GLM-4.5, GLM-4.5-Air and GLM-4.6."""
    text = reader.text
    mixer = reader.attention(
        qkv_bias=text.attention_bias, o_bias=False, qk_norm=text.use_qk_norm, window=None
    )
    count = text.num_hidden_layers
    num_dense = min(text.first_k_dense_replace, count)
    blocks: list[BlockSpec] = [reader.dense(bias=False)] * num_dense
    if num_dense < count:
        blocks += [_experts(reader)] * (count - num_dense)
    layers = [LayerSpec(mixers=(mixer,), feed_forward=block) for block in blocks]
    return reader.model(layers, ropes=[reader.rope(is_partial=True)])


def _experts(reader: ConfigReader) -> SharedSpec:
    text = reader.text
    if (text.n_group, text.topk_group) != (1, 1):
        raise ModelError(
            f"the model chooses among groups of experts (n_group {text.n_group}, topk_group "
            f"{text.topk_group}); this version serves those with one group. Choose another "
            "checkpoint."
        )
    return SharedSpec(
        experts=reader.experts(
            text.n_routed_experts,
            intermediate_size=text.moe_intermediate_size,
            scoring=Scoring.SIGMOID_RENORMALISED if text.norm_topk_prob else Scoring.SIGMOID,
            has_correction=True,
            factor=float(text.routed_scaling_factor),
        ),
        shared=DenseSpec(
            intermediate_size=text.moe_intermediate_size * text.n_shared_experts,
            activation=reader.activation(),
            bias=False,
            name="mlp.shared_experts",
        ),
        gate=None,
    )


def translate(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Experts one by one; a GGUF file calls the numbers of the choice biases."""
    return per_expert(renamed({f"{_CORRECTION}.bias": _CORRECTION})(weights))


def _of_gguf(file: GGUFFile, values: Values) -> Values:
    function = file.whole("glm4moe.expert_gating_func", default=_SIGMOID)
    if function != _SIGMOID:
        raise ModelError(
            f"glm4moe.expert_gating_func of {file.path} is {function}; this version computes "
            f"{_SIGMOID}, the sigmoid. Convert the model again."
        )
    drafting = file.whole("glm4moe.nextn_predict_layers", least=0, default=0)
    rotated = file.whole("glm4moe.rope.dimension_count", default=values["head_dim"])
    rope = {**values["rope_parameters"], "partial_rotary_factor": rotated / values["head_dim"]}
    return {
        "num_hidden_layers": values["num_hidden_layers"] - drafting,
        "n_routed_experts": file.whole("glm4moe.expert_count"),
        "num_experts_per_tok": file.whole("glm4moe.expert_used_count"),
        "moe_intermediate_size": file.whole("glm4moe.expert_feed_forward_length"),
        "n_shared_experts": file.whole("glm4moe.expert_shared_count"),
        "first_k_dense_replace": file.whole(
            "glm4moe.leading_dense_block_count", least=0, default=0
        ),
        "norm_topk_prob": file.metadata.get("glm4moe.expert_weights_norm", True),
        "routed_scaling_factor": file.number("glm4moe.expert_weights_scale", default=1.0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": rope,
    }


ARCHITECTURES = {
    "Glm4MoeForCausalLM": Architecture(
        {
            "glm4_moe": ConfigType(
                COMMON
                | {
                    "vocab_size": 151552,
                    "hidden_size": 4096,
                    "intermediate_size": 10944,
                    "num_hidden_layers": 46,
                    "num_attention_heads": 96,
                    "num_key_value_heads": 8,
                    "max_position_embeddings": 131072,
                    "rms_norm_eps": 1e-5,
                    "attention_bias": False,
                    "moe_intermediate_size": 1408,
                    "num_experts_per_tok": 8,
                    "n_shared_experts": 1,
                    "n_routed_experts": 128,
                    "routed_scaling_factor": 1.0,
                    "n_group": 1,
                    "topk_group": 1,
                    "first_k_dense_replace": 1,
                    "norm_topk_prob": True,
                    "use_qk_norm": False,
                },
                other_names={"n_routed_experts": "num_local_experts"},
                partial=0.5,
            )
        },
        describe,
        translate,
        prediction=PredictionNames.NUMBERED,
        fields={"use_qk_norm": FLAG},
        gguf=GgufForm(
            "glm4moe",
            "glm4_moe",
            _of_gguf,
            in_block={
                "post_attention_norm": "post_attention_layernorm",
                "exp_probs_b": _CORRECTION.removeprefix("."),
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
            },
            reads=(
                "rope.dimension_count",
                "expert_gating_func",
                "expert_shared_count",
                "expert_weights_scale",
                "leading_dense_block_count",
                "nextn_predict_layers",
            ),
            has_experts=True,
        ),
    ),
}
